// Gradient, Adam's two averages -> their next values and a direction, and the derivatives of both, for one element.
// Kingma and Ba 2015, algorithm 1; `eps_root` as in optax.
#pragma once

#include "../numeric.h"

#include <torch/headeronly/macros/Macros.h>

#include <cmath>

namespace todist {

// What is the same for all elements of a tensor. With t steps made, correction1 is 1 - b1**t, and correction2 alike.
struct AdamNumbers {
  double b1;
  double b2;
  double eps;
  double eps_root;
  double correction1;
  double correction2;
  double factor = 1;        // what the direction is multiplied by before it is added to the parameter
  double kept = 1;          // what the parameter is multiplied by, for a decoupled weight decay
  double weight_decay = 0;  // how much of the parameter is added to its gradient
  bool maximize = false;
};

// The averages' next values.
template <class A>
struct AdamAverages {
  A rest1, b2, rest2;

  explicit AdamAverages(const AdamNumbers& n)
      : rest1(static_cast<A>(1 - n.b1)), b2(static_cast<A>(n.b2)), rest2(static_cast<A>(1 - n.b2)) {}

  C10_HOST_DEVICE inline void operator()(A grad, A& exp_avg, A& exp_avg_sq) const {
    exp_avg = exp_avg + rest1 * (grad - exp_avg);
    exp_avg_sq = b2 * exp_avg_sq + rest2 * grad * grad;
  }
};

// The gradient to descend along: negated to maximize, and with a part of the parameter added (L2 penalty).
template <class A>
struct AdamDescent {
  A sign, weight_decay;
  Choice<A> decays;

  explicit AdamDescent(const AdamNumbers& n)
      : sign(n.maximize ? -1 : 1), weight_decay(static_cast<A>(n.weight_decay)), decays(n.weight_decay != 0) {}

  C10_HOST_DEVICE inline A operator()(A grad, A param) const {
    return decays != 0 ? sign * grad + weight_decay * param : sign * grad;
  }
};

// The averages are new, and so is the parameter, moved by a factor times the direction; without a parameter, only that.
template <class A>
struct AdamDirection {
  AdamAverages<A> averages;
  AdamDescent<A> descent;
  A over1, over2, eps, eps_root, kept;

  explicit AdamDirection(const AdamNumbers& n)
      : averages(n),
        descent(n),
        over1(static_cast<A>(n.factor / n.correction1)),
        over2(static_cast<A>(1 / n.correction2)),
        eps(static_cast<A>(n.eps)),
        eps_root(static_cast<A>(n.eps_root)),
        kept(static_cast<A>(n.kept)) {}

  C10_HOST_DEVICE inline void operator()(A& moved, A& new_exp_avg, A& new_exp_avg_sq, A grad, A exp_avg, A exp_avg_sq,
                                         A param) const {
    averages(descent(grad, param), exp_avg, exp_avg_sq);
    new_exp_avg = exp_avg;
    new_exp_avg_sq = exp_avg_sq;
    moved = kept * param + exp_avg * over1 / (std::sqrt(exp_avg_sq * over2 + eps_root) + eps);
  }
};

// Gradients of AdamDirection's three results -> gradients of its grad and of its averages, and of its parameter if there is
// weight decay: without it, that is only `kept` times the gradient of `moved`, and not computed here. The derivative of the
// root at 0 is taken to be 0, its limit as the gradient goes to 0. The new averages are made again: as results they are
// rounded to the tensors' dtype, and where one of float16 has become 0, the derivative would be that of another point.
template <class A>
struct AdamBackward {
  AdamAverages<A> averages;
  AdamDescent<A> descent;
  A b1, over1, over2, eps, eps_root, factor, kept;

  explicit AdamBackward(const AdamNumbers& n)
      : averages(n),
        descent(n),
        b1(static_cast<A>(n.b1)),
        over1(static_cast<A>(1 / n.correction1)),
        over2(static_cast<A>(1 / n.correction2)),
        eps(static_cast<A>(n.eps)),
        eps_root(static_cast<A>(n.eps_root)),
        factor(static_cast<A>(n.factor)),
        kept(static_cast<A>(n.kept)) {}

  C10_HOST_DEVICE inline void operator()(A& to_grad, A& to_exp_avg, A& to_exp_avg_sq, A of_moved, A of_exp_avg,
                                         A of_exp_avg_sq, A grad, A exp_avg, A exp_avg_sq) const {
    to_grad = descent.sign * through(to_exp_avg, to_exp_avg_sq, of_moved, of_exp_avg, of_exp_avg_sq,
                                     descent.sign * grad, exp_avg, exp_avg_sq);
  }

  C10_HOST_DEVICE inline void operator()(A& to_grad, A& to_exp_avg, A& to_exp_avg_sq, A& to_param, A of_moved,
                                         A of_exp_avg, A of_exp_avg_sq, A grad, A exp_avg, A exp_avg_sq,
                                         A param) const {
    const A to_descent = through(to_exp_avg, to_exp_avg_sq, of_moved, of_exp_avg, of_exp_avg_sq,
                                 descent.sign * grad + descent.weight_decay * param, exp_avg, exp_avg_sq);
    to_grad = descent.sign * to_descent;
    to_param = kept * of_moved + descent.weight_decay * to_descent;
  }

 private:
  // The gradient of the gradient to descend along.
  C10_HOST_DEVICE inline A through(A& to_exp_avg, A& to_exp_avg_sq, A of_moved, A of_exp_avg,
                                   A of_exp_avg_sq, A grad, A exp_avg, A exp_avg_sq) const {
    averages(grad, exp_avg, exp_avg_sq);
    const A root = std::sqrt(exp_avg_sq * over2 + eps_root);
    const A over_below = 1 / (root + eps);
    const A of_direction = factor * of_moved;
    const A of_root = -of_direction * (exp_avg * over1 * over_below * over_below);
    of_exp_avg = of_exp_avg + of_direction * over_below * over1;
    of_exp_avg_sq = of_exp_avg_sq + (root == 0 ? A(0) : of_root / (2 * root) * over2);
    to_exp_avg = b1 * of_exp_avg;
    to_exp_avg_sq = averages.b2 * of_exp_avg_sq;
    return averages.rest1 * of_exp_avg + 2 * averages.rest2 * grad * of_exp_avg_sq;
  }
};

}  // namespace todist
