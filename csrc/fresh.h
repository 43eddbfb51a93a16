// A tensor -> a new one of its shape, dtype and device, with its strides if they leave no gaps. Nothing is in it yet.
#pragma once

#include "handle.h"
#include "layout.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdint>
#include <vector>

namespace todist {

// The op `empty_like` is looked up by its name at each call, which takes longer than to make the tensor.
inline Owned empty_like(AtenTensorHandle tensor, const View& view) {
  std::vector<int64_t> rows;
  const int64_t* strides = view.strides.data();
  if (!dense_in_some_order(view)) {
    rows.resize(view.sizes.size());
    int64_t stride = 1;
    for (size_t dim = rows.size(); dim-- > 0; stride *= std::max<int64_t>(view.sizes[dim], 1)) {
      rows[dim] = stride;
    }
    strides = rows.data();
  }
  const int32_t type = view.cuda ? aoti_torch_device_type_cuda() : aoti_torch_device_type_cpu();
  int32_t dtype = 0;
  AtenTensorHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor, &dtype));
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(view.sizes.size()), view.sizes.data(),
                                                         strides, dtype, type, view.device, &made));
  return Owned(made);
}

}  // namespace todist
