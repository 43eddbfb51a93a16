// The tensors of a list -> handles of libtorch's, freed once.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <initializer_list>
#include <memory>
#include <vector>

namespace todist {

// `torch::stable::Tensor` would put a shared pointer around each handle, a fifth of what a list costs.
using List = std::vector<AtenTensorHandle>;

struct Free {
  void operator()(AtenTensorHandle handle) const { aoti_torch_delete_tensor_object(handle); }
};

using Owned = std::unique_ptr<AtenTensorOpaque, Free>;

// Frees the handles of an op's arguments when the op returns or refuses. Each op makes one before all else.
class Arguments {
 public:
  Arguments(std::initializer_list<const List*> lists) : lists_(lists) {}
  Arguments(const Arguments&) = delete;
  Arguments& operator=(const Arguments&) = delete;
  ~Arguments() {
    for (const List* list : lists_) {
      for (const AtenTensorHandle handle : *list) {
        Free()(handle);
      }
    }
  }

 private:
  std::vector<const List*> lists_;
};

}  // namespace todist
