// Every op's schema, and nothing else. The kernels register themselves next to their code.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(todist, library) {
  library.def("add_scaled_(Tensor(a!)[] params, Tensor[] updates, float alpha) -> ()");
}
