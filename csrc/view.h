// A tensor -> its dtype, shape, strides and memory.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/shim_utils.h>

#include <cstdint>

namespace todist {

using torch::headeronly::IntHeaderOnlyArrayRef;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

enum class Access { kRead, kWrite };

// What a kernel needs to know of a tensor, asked once: each question is a call across the library's border.
struct View {
  View(const Tensor& tensor, Access access) : View(tensor.get(), access) {}

  View(AtenTensorHandle tensor, Access access) : written(access == Access::kWrite) {
    int32_t device_type = 0;
    int32_t type = 0;
    int64_t dim = 0;
    int64_t* ints = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor, &device_type));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor, &type));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(tensor, &dim));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(tensor, &ints));
    sizes = IntHeaderOnlyArrayRef(ints, static_cast<size_t>(dim));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(tensor, &ints));
    strides = IntHeaderOnlyArrayRef(ints, static_cast<size_t>(dim));
    cpu = device_type == aoti_torch_device_type_cpu();
    cuda = device_type == aoti_torch_device_type_cuda();
    if (cuda) {
      TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor, &device));
    }
    dtype = torch::stable::detail::to<ScalarType>(torch::stable::detail::from(type));
    for (const int64_t size : sizes) {
      numel *= size;
    }
    if (!(cpu || cuda) || numel == 0) {
      return;
    }
    if (written) {
      TORCH_ERROR_CODE_CHECK(torch_get_mutable_data_ptr(tensor, &data));
    } else {
      const void* read = nullptr;
      TORCH_ERROR_CODE_CHECK(torch_get_const_data_ptr(tensor, &read));
      data = const_cast<void*>(read);
    }
    itemsize = static_cast<int64_t>(aoti_torch_dtype_element_size(type));
  }

  bool cpu = false;
  bool cuda = false;
  int32_t device = 0;  // which one of its type
  ScalarType dtype = ScalarType::Undefined;
  IntHeaderOnlyArrayRef sizes;
  IntHeaderOnlyArrayRef strides;
  bool written = false;
  int64_t numel = 1;
  int64_t itemsize = 0;
  void* data = nullptr;  // not to be written through unless `written`
};

}  // namespace todist
