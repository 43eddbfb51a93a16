// Parameter, gradient, running sum -> a step of stochastic gradient descent, for one element.
// The running sum is Sutskever et al. 2013, equations 1 and 2, without the learning rate inside, as torch has it.
#pragma once

#include <torch/headeronly/macros/Macros.h>

namespace todist {

// What is the same for all elements of a tensor. `taken` is how much of the gradient goes into the running sum.
struct SgdNumbers {
  double lr;
  double momentum;
  double weight_decay;
  bool nesterov;
  bool maximize;
  double taken = 1;
};

template <class A>
struct SgdStep {
  A lr, momentum, weight_decay, taken;
  bool decays, nesterov, maximize;

  explicit SgdStep(const SgdNumbers& n)
      : lr(static_cast<A>(n.lr)),
        momentum(static_cast<A>(n.momentum)),
        weight_decay(static_cast<A>(n.weight_decay)),
        taken(static_cast<A>(n.taken)),
        decays(n.weight_decay != 0),
        nesterov(n.nesterov),
        maximize(n.maximize) {}

  C10_HOST_DEVICE inline A uphill(A param, A grad) const {
    grad = maximize ? -grad : grad;
    return decays ? grad + weight_decay * param : grad;
  }

  C10_HOST_DEVICE inline void operator()(A& param, A grad) const { param = param - lr * uphill(param, grad); }

  C10_HOST_DEVICE inline void operator()(A& param, A grad, A& sum) const {
    grad = uphill(param, grad);
    sum = momentum * sum + taken * grad;
    param = param - lr * (nesterov ? grad + momentum * sum : sum);
  }
};

}  // namespace todist
