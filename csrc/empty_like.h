// A tensor -> a new one of its shape, dtype and device, with the strides that `torch.empty_like` gives. Nothing is in it yet.
#pragma once

#include "handle.h"
#include "layout.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>

#include <cstdint>

namespace todist {

// The op `empty_like` is looked up by its name at each call, which takes longer than to make the tensor. So it is asked only
// where the tensor has gaps, or elements that share memory: what strides the new one has is then torch's to say.
inline Owned empty_like(AtenTensorHandle tensor, const View& view) {
  AtenTensorHandle made = nullptr;
  if (!dense_in_some_order(view)) {
    AtenTensorHandle same = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(tensor, &same));
    const Tensor found = torch::stable::empty_like(Tensor(same));
    TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(found.get(), &made));
    return Owned(made);
  }
  const int32_t type = view.cuda ? aoti_torch_device_type_cuda() : aoti_torch_device_type_cpu();
  int32_t dtype = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor, &dtype));
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(view.sizes.size()), view.sizes.data(),
                                                         view.strides.data(), dtype, type, view.device, &made));
  return Owned(made);
}

}  // namespace todist
