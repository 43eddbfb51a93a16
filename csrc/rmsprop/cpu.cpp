// The ops of op.h -> torch.ops.todist, on the CPU.
#include "../cpu_kernel.h"
#include "op.h"

#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY_IMPL(todist, CPU, library) {
  library.impl("rmsprop_", TORCH_BOX(&todist::rmsprop_));
  library.impl("rmsprop", TORCH_BOX(&todist::rmsprop));
  library.impl("rmsprop_backward", TORCH_BOX(&todist::rmsprop_backward));
}
