// params, updates, alpha -> params[i] += alpha * updates[i], in place.
// `run` is that of the file which includes this one: cpu_kernel.h on the CPU, cuda_kernel.h on CUDA.
#pragma once

#include "../arguments.h"
#include "formula.h"

namespace todist {
namespace {

struct AddScaledOp {
  static constexpr const char* kName = "add_scaled_";
  static constexpr std::array<Argument, 2> kArguments{{{"params", Role::kUpdated}, {"updates", Role::kRead}}};
  using Numbers = double;
  template <class A>
  using Formula = AddScaled<A>;
};

void add_scaled_(const List& params, const List& updates, double alpha) {
  const Arguments arguments{&params, &updates};
  run<AddScaledOp>({&params, &updates}, [alpha](size_t) { return alpha; });
}

}  // namespace
}  // namespace todist
