// The ops of op.h -> torch.ops.todist, on the CPU.
#include "../cpu_kernel.h"
#include "op.h"

#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY_IMPL(todist, CPU, library) { library.impl("add_scaled_", TORCH_BOX(&todist::add_scaled_)); }
