// params, updates, alpha -> params[i] += alpha * updates[i], in place, on the CPU.
#include "../kernel.h"
#include "formula.h"

#include <torch/csrc/stable/library.h>

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

STABLE_TORCH_LIBRARY_IMPL(todist, CPU, library) { library.impl("add_scaled_", TORCH_BOX(&todist::add_scaled_)); }
