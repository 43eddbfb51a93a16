// A device's index, a kernel and its parameter -> the kernel launched there, on the stream that torch uses now.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>
#include <torch/headeronly/util/shim_utils.h>

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

namespace todist {

constexpr int kThreads = 128;             // a block
constexpr int64_t kMostBlocks = 1 << 16;  // a launch; kernels go on in strides of the whole grid
constexpr size_t kParameterBytes = 4096;  // what a launch carries on every driver

// The parameter travels with the launch: nothing is copied or waited for, and nothing need outlive this call.
template <class Parameter>
void launch(int32_t device, void (*kernel)(const Parameter), int64_t blocks, Parameter& parameter) {
  static_assert(sizeof(Parameter) <= kParameterBytes);
  const torch::stable::accelerator::DeviceGuard guard(device);
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  void* parameters[] = {&parameter};
  const dim3 grid(static_cast<unsigned int>(std::min(blocks, kMostBlocks)));
  STD_CUDA_CHECK(cudaLaunchKernel(kernel, grid, dim3(kThreads), parameters, 0, static_cast<cudaStream_t>(stream)));
}

}  // namespace todist
