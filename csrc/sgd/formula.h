// Parameter, gradient, running sum -> a step of stochastic gradient descent, and its derivatives, for one element.
// The running sum is Sutskever et al. 2013, equations 1 and 2, without the learning rate inside, as torch has it.
#pragma once

#include "../numeric.h"

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

// What is moved and the next sum are new; without a parameter, what is moved is only the step.
template <class A>
struct SgdMove {
  A lr, momentum, weight_decay, taken;
  Choice<A> decays, nesterov, maximize;

  explicit SgdMove(const SgdNumbers& n)
      : lr(static_cast<A>(n.lr)),
        momentum(static_cast<A>(n.momentum)),
        weight_decay(static_cast<A>(n.weight_decay)),
        taken(static_cast<A>(n.taken)),
        decays(n.weight_decay != 0),
        nesterov(n.nesterov),
        maximize(n.maximize) {}

  C10_HOST_DEVICE inline A descent(A grad, A param) const {
    grad = maximize != 0 ? -grad : grad;
    return decays != 0 ? grad + weight_decay * param : grad;
  }

  C10_HOST_DEVICE inline void operator()(A& moved, A grad, A param) const {
    moved = param - lr * descent(grad, param);
  }

  C10_HOST_DEVICE inline void operator()(A& moved, A& new_sum, A grad, A sum, A param) const {
    grad = descent(grad, param);
    new_sum = momentum * sum + taken * grad;
    moved = param - lr * (nesterov != 0 ? grad + momentum * new_sum : new_sum);
  }
};

// Gradients of SgdMove's results -> gradients of its grad, its sum and, with weight decay, its parameter. The step
// is linear, so no value of the forward direction is needed.
template <class A>
struct SgdBackward {
  A lr, momentum, weight_decay, taken;
  Choice<A> nesterov, maximize;

  explicit SgdBackward(const SgdNumbers& n)
      : lr(static_cast<A>(n.lr)),
        momentum(static_cast<A>(n.momentum)),
        weight_decay(static_cast<A>(n.weight_decay)),
        taken(static_cast<A>(n.taken)),
        nesterov(n.nesterov),
        maximize(n.maximize) {}

  C10_HOST_DEVICE inline void operator()(A& to_grad, A of_moved) const {
    const A of_descent = -lr * of_moved;
    to_grad = maximize != 0 ? -of_descent : of_descent;
  }

  C10_HOST_DEVICE inline void operator()(A& to_grad, A& to_param, A of_moved) const {
    (*this)(to_grad, of_moved);
    to_param = of_moved + weight_decay * (maximize != 0 ? -to_grad : to_grad);
  }

  C10_HOST_DEVICE inline void operator()(A& to_grad, A& to_sum, A of_moved, A of_sum) const {
    const A of_step = -lr * of_moved;
    of_sum = of_sum + (nesterov != 0 ? momentum * of_step : of_step);
    const A of_descent = nesterov != 0 ? taken * of_sum + of_step : taken * of_sum;
    to_sum = momentum * of_sum;
    to_grad = maximize != 0 ? -of_descent : of_descent;
  }

  C10_HOST_DEVICE inline void operator()(A& to_grad, A& to_sum, A& to_param, A of_moved, A of_sum) const {
    (*this)(to_grad, to_sum, of_moved, of_sum);
    to_param = of_moved + weight_decay * (maximize != 0 ? -to_grad : to_grad);
  }
};

}  // namespace todist
