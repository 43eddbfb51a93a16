// param, update, alpha -> param + alpha * update, for one element.
#pragma once

#include <torch/headeronly/macros/Macros.h>

namespace todist {

template <class A>
C10_HOST_DEVICE inline A add_scaled(A param, A update, A alpha) {
  return param + alpha * update;
}

}  // namespace todist
