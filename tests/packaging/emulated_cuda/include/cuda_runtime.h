// What the kernels use of CUDA -> the same on the CPU: a launch runs all threads before it returns, the last one first.
#pragma once

#include <cstddef>

#define __global__
#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)

// A tensor of the CPU passes for one of the device, and no driver is asked for anything.
#define aoti_torch_device_type_cuda aoti_torch_device_type_cpu
#define aoti_torch_get_device_index emulated_get_device_index
#define aoti_torch_create_device_guard emulated_create_device_guard
#define aoti_torch_delete_device_guard emulated_delete_device_guard

struct dim3 {
  unsigned int x, y = 1, z = 1;

  explicit dim3(unsigned int x_ = 0) : x(x_) {}
};

inline thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;

using cudaStream_t = struct CUstream_st*;
using cudaError_t = int;

extern "C" int emulated_launch(size_t bytes, unsigned int blocks, unsigned int threads, cudaStream_t stream);

template <class Parameter>
cudaError_t cudaLaunchKernel(void (*kernel)(Parameter), dim3 grid, dim3 block, void** parameters, size_t,
                             cudaStream_t stream) {
  const int error = emulated_launch(sizeof(Parameter), grid.x, block.x, stream);
  if (error != 0) {
    return error;
  }
  const Parameter copy = *static_cast<const Parameter*>(parameters[0]);
  gridDim = grid;
  blockDim = block;
  for (unsigned int b = grid.x; b-- > 0;) {
    blockIdx = dim3(b);
    for (unsigned int t = block.x; t-- > 0;) {
      threadIdx = dim3(t);
      kernel(copy);
    }
  }
  return 0;
}
