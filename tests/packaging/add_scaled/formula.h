// param, update, alpha -> param + alpha * update, for one element.
#pragma once

#include <torch/headeronly/macros/Macros.h>

namespace todist {

template <class A>
struct AddScaled {
  A alpha;

  explicit AddScaled(double alpha_) : alpha(static_cast<A>(alpha_)) {}

  C10_HOST_DEVICE inline void operator()(A& param, A update) const { param = param + alpha * update; }
};

}  // namespace todist
