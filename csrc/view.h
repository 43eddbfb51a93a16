// A tensor -> its dtype, shape, strides and memory.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>

namespace todist {

using torch::headeronly::IntHeaderOnlyArrayRef;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

enum class Access { kRead, kWrite };

// What a kernel needs to know of a tensor, asked once: each question is a call across the library's border.
struct View {
  View(const Tensor& tensor, Access access)
      : cpu(tensor.is_cpu()),
        dtype(tensor.scalar_type()),
        sizes(tensor.sizes()),
        strides(tensor.strides()),
        written(access == Access::kWrite) {
    for (const int64_t size : sizes) {
      numel *= size;
    }
    if (cpu && numel > 0) {
      data = written ? tensor.mutable_data_ptr() : const_cast<void*>(tensor.const_data_ptr());
      itemsize = static_cast<int64_t>(tensor.element_size());
    }
  }

  bool cpu;
  ScalarType dtype;
  IntHeaderOnlyArrayRef sizes;
  IntHeaderOnlyArrayRef strides;
  bool written;
  int64_t numel = 1;
  int64_t itemsize = 0;
  void* data = nullptr;  // not to be written through unless `written`
};

}  // namespace todist
