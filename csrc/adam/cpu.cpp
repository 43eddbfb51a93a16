// The ops of op.h -> torch.ops.todist, on the CPU.
#include "../cpu_kernel.h"
#include "op.h"

#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY_IMPL(todist, CPU, library) {
  library.impl("adam", TORCH_BOX(&todist::adam));
  library.impl("adam_backward", TORCH_BOX(&todist::adam_backward));
}
