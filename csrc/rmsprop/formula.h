// Gradient, running averages -> RMSprop's step, and the derivatives of its direction, for one element.
// Tieleman and Hinton 2012, lecture 6.5; centered: Graves 2013, equations 38 to 45.
#pragma once

#include "../numeric.h"

#include <torch/headeronly/macros/Macros.h>

#include <cmath>

namespace todist {

// A type's own, not a number's: a choice within the loop keeps the compiler from making vectors of the larger ones.
enum class Momentum { kNone, kPlain, kNesterov };

// What is the same for all elements.
struct RmspropNumbers {
  double alpha;
  double eps;
  double momentum = 0;
  double factor = 1;        // what a parameter is moved by is multiplied by this
  double weight_decay = 0;  // how much of the parameter is added to its gradient
  bool maximize = false;
};

// The averages' next values -> the root. Centered, it is that of a variance, which is at least 0; NaN stays NaN.
template <class A>
struct RmspropRoot {
  A alpha, rest;

  explicit RmspropRoot(const RmspropNumbers& n) : alpha(static_cast<A>(n.alpha)), rest(static_cast<A>(1 - n.alpha)) {}

  C10_HOST_DEVICE inline A operator()(A grad, A& square_avg) const {
    square_avg = alpha * square_avg + rest * grad * grad;
    return std::sqrt(square_avg);
  }

  C10_HOST_DEVICE inline A operator()(A grad, A& square_avg, A& grad_avg) const {
    square_avg = alpha * square_avg + rest * grad * grad;
    grad_avg = grad_avg + rest * (grad - grad_avg);
    const A square = grad_avg * grad_avg;  // more than the other by rounding, where gradients hardly change
    return std::sqrt(square_avg < square ? A(0) : square_avg - square);
  }
};

// The state is new, and so is the parameter, moved by a factor times the move; without a parameter, only that. The
// factor is multiplied into each term: with the factor times a sum or a quotient, ptxas spills a register.
template <class A, bool kCentered, Momentum kMomentum>
struct RmspropMoved {
  RmspropRoot<A> root;
  A eps, momentum, factor;

  explicit RmspropMoved(const RmspropNumbers& n)
      : root(n),
        eps(static_cast<A>(n.eps)),
        momentum(static_cast<A>(n.momentum)),
        factor(static_cast<A>(n.factor)) {}

  C10_HOST_DEVICE inline void operator()(A& moved, A& new_square_avg, A grad, A square_avg, A param) const {
    moved = param + factor * grad / (root(grad, square_avg) + eps);
    new_square_avg = square_avg;
  }

  C10_HOST_DEVICE inline void operator()(A& moved, A& new_square_avg, A& new_other, A grad, A square_avg, A other,
                                         A param) const {
    if constexpr (kCentered) {
      moved = param + factor * grad / (root(grad, square_avg, other) + eps);
    } else {
      moved = move_along(grad / (root(grad, square_avg) + eps), other, param);
    }
    new_square_avg = square_avg;
    new_other = other;
  }

  C10_HOST_DEVICE inline void operator()(A& moved, A& new_square_avg, A& new_grad_avg, A& new_sum, A grad,
                                         A square_avg, A grad_avg, A sum, A param) const {
    const A direction = grad / (root(grad, square_avg, grad_avg) + eps);
    new_square_avg = square_avg;
    new_grad_avg = grad_avg;
    moved = move_along(direction, sum, param);
    new_sum = sum;
  }

 private:
  C10_HOST_DEVICE inline A move_along(A direction, A& sum, A param) const {
    sum = momentum * sum + direction;
    if constexpr (kMomentum == Momentum::kNesterov) {
      return param + factor * direction + factor * momentum * sum;
    }
    return param + factor * sum;
  }
};

// The whole step in place: of the gradient to descend along.
template <class A, bool kCentered, Momentum kMomentum>
struct RmspropStep {
  RmspropMoved<A, kCentered, kMomentum> next;
  A weight_decay;
  Choice<A> decays, maximize;

  explicit RmspropStep(const RmspropNumbers& n)
      : next(n), weight_decay(static_cast<A>(n.weight_decay)), decays(n.weight_decay != 0), maximize(n.maximize) {}

  template <class... State>
  C10_HOST_DEVICE inline void operator()(A& param, A grad, State&... state) const {
    grad = maximize != 0 ? -grad : grad;
    grad = decays != 0 ? grad + weight_decay * param : grad;
    next(param, state..., grad, state..., param);
  }
};

// Gradients of RmspropMoved's results -> gradients of its grad and of its state. The averages are the old ones:
// the new ones are computed again, which spares the rounding that they are stored with. The derivative of the root at 0
// is taken to be 0, its limit as the gradient goes to 0.
template <class A, Momentum kMomentum>
struct RmspropBackward {
  RmspropRoot<A> root_of;
  A eps, momentum, factor;

  explicit RmspropBackward(const RmspropNumbers& n)
      : root_of(n),
        eps(static_cast<A>(n.eps)),
        momentum(static_cast<A>(n.momentum)),
        factor(static_cast<A>(n.factor)) {}

  C10_HOST_DEVICE inline void operator()(A& to_grad, A& to_square_avg, A of_moved, A of_square_avg, A grad,
                                         A square_avg) const {
    through(factor * of_moved, to_grad, to_square_avg, of_square_avg, grad, square_avg);
  }

  C10_HOST_DEVICE inline void operator()(A& to_grad, A& to_square_avg, A& to_grad_avg, A of_moved, A of_square_avg,
                                         A of_grad_avg, A grad, A square_avg, A grad_avg) const {
    through(factor * of_moved, to_grad, to_square_avg, to_grad_avg, of_square_avg, of_grad_avg, grad, square_avg,
            grad_avg);
  }

  C10_HOST_DEVICE inline void operator()(A& to_grad, A& to_square_avg, A& to_sum, A of_moved, A of_square_avg,
                                         A of_sum, A grad, A square_avg) const {
    of_sum = of_sum + of_next(factor * of_moved);
    through(of_direction(factor * of_moved, of_sum), to_grad, to_square_avg, of_square_avg, grad, square_avg);
    to_sum = momentum * of_sum;
  }

  C10_HOST_DEVICE inline void operator()(A& to_grad, A& to_square_avg, A& to_grad_avg, A& to_sum, A of_moved,
                                         A of_square_avg, A of_grad_avg, A of_sum, A grad, A square_avg,
                                         A grad_avg) const {
    of_sum = of_sum + of_next(factor * of_moved);
    through(of_direction(factor * of_moved, of_sum), to_grad, to_square_avg, to_grad_avg, of_square_avg, of_grad_avg,
            grad, square_avg, grad_avg);
    to_sum = momentum * of_sum;
  }

 private:
  // The gradient of the new running sum, from that of the move.
  C10_HOST_DEVICE inline A of_next(A of_move) const {
    return kMomentum == Momentum::kNesterov ? momentum * of_move : of_move;
  }

  // The gradient of the direction, from that of the new running sum and, looking ahead, that of the move itself.
  C10_HOST_DEVICE inline A of_direction(A of_move, A of_sum) const {
    return kMomentum == Momentum::kNesterov ? of_sum + of_move : of_sum;
  }

  C10_HOST_DEVICE inline void through(A of_direction, A& to_grad, A& to_square_avg, A of_square_avg, A grad,
                                      A square_avg) const {
    const A root = root_of(grad, square_avg);
    const A over_below = 1 / (root + eps);
    of_square_avg = of_square_avg + of_inside(of_direction, grad, root, over_below);
    to_grad = of_direction * over_below + 2 * root_of.rest * grad * of_square_avg;
    to_square_avg = root_of.alpha * of_square_avg;
  }

  C10_HOST_DEVICE inline void through(A of_direction, A& to_grad, A& to_square_avg, A& to_grad_avg, A of_square_avg,
                                      A of_grad_avg, A grad, A square_avg, A grad_avg) const {
    const A root = root_of(grad, square_avg, grad_avg);
    const A over_below = 1 / (root + eps);
    const A inside = of_inside(of_direction, grad, root, over_below);
    of_square_avg = of_square_avg + inside;
    of_grad_avg = of_grad_avg - 2 * grad_avg * inside;
    to_grad = of_direction * over_below + 2 * root_of.rest * grad * of_square_avg + root_of.rest * of_grad_avg;
    to_square_avg = root_of.alpha * of_square_avg;
    to_grad_avg = root_of.alpha * of_grad_avg;
  }

  // The gradient of what is inside the root, from that of the direction.
  C10_HOST_DEVICE inline A of_inside(A of_direction, A grad, A root, A over_below) const {
    const A of_root = -of_direction * (grad * over_below * over_below);
    return root == 0 ? A(0) : of_root / (2 * root);
  }
};

}  // namespace todist
