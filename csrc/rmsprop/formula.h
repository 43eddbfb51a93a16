// Gradient, running averages -> RMSprop's step, and the derivatives of its direction, for one element.
// Tieleman and Hinton 2012, lecture 6.5; centered: Graves 2013, equations 38 to 45.
#pragma once

#include <torch/headeronly/macros/Macros.h>

#include <cmath>

namespace todist {

// What is the same for all elements.
struct RmspropNumbers {
  double alpha;
  double eps;
  double lr = 0;
  double momentum = 0;
  double weight_decay = 0;
  bool nesterov = false;
  bool maximize = false;
};

// The direction, and the averages' next values. Centered, the root is that of a variance.
template <class A>
struct RmspropDirection {
  A alpha, rest, eps;

  explicit RmspropDirection(const RmspropNumbers& n)
      : alpha(static_cast<A>(n.alpha)), rest(static_cast<A>(1 - n.alpha)), eps(static_cast<A>(n.eps)) {}

  C10_HOST_DEVICE inline A move(A grad, A& square_avg) const {
    square_avg = alpha * square_avg + rest * grad * grad;
    return grad / (std::sqrt(square_avg) + eps);
  }

  C10_HOST_DEVICE inline A move(A grad, A& square_avg, A& grad_avg) const {
    square_avg = alpha * square_avg + rest * grad * grad;
    grad_avg = grad_avg + rest * (grad - grad_avg);
    return grad / (std::sqrt(square_avg - grad_avg * grad_avg) + eps);
  }

  C10_HOST_DEVICE inline void operator()(A& direction, A& new_square_avg, A grad, A square_avg) const {
    direction = move(grad, square_avg);
    new_square_avg = square_avg;
  }

  C10_HOST_DEVICE inline void operator()(A& direction, A& new_square_avg, A& new_grad_avg, A grad, A square_avg,
                                         A grad_avg) const {
    direction = move(grad, square_avg, grad_avg);
    new_square_avg = square_avg;
    new_grad_avg = grad_avg;
  }
};

// The whole step; what there is after `grad` is `square_avg`, then `grad_avg` if centered, then `sum` with momentum.
template <class A, bool kCentered, bool kMomentum>
struct RmspropStep {
  RmspropDirection<A> direction;
  A lr, momentum, weight_decay;
  bool decays, nesterov, maximize;

  explicit RmspropStep(const RmspropNumbers& n)
      : direction(n),
        lr(static_cast<A>(n.lr)),
        momentum(static_cast<A>(n.momentum)),
        weight_decay(static_cast<A>(n.weight_decay)),
        decays(n.weight_decay != 0),
        nesterov(n.nesterov),
        maximize(n.maximize) {}

  template <class... Rest>
  C10_HOST_DEVICE inline void operator()(A& param, A grad, Rest&... rest) const {
    grad = maximize ? -grad : grad;
    grad = decays ? grad + weight_decay * param : grad;
    param = param - lr * move(grad, rest...);
  }

 private:
  C10_HOST_DEVICE inline A add_up(A move, A& sum) const {
    sum = momentum * sum + move;
    return nesterov ? move + momentum * sum : sum;
  }

  C10_HOST_DEVICE inline A move(A grad, A& square_avg) const { return direction.move(grad, square_avg); }

  C10_HOST_DEVICE inline A move(A grad, A& square_avg, A& other) const {
    if constexpr (kCentered) {
      return direction.move(grad, square_avg, other);
    } else {
      return add_up(direction.move(grad, square_avg), other);
    }
  }

  C10_HOST_DEVICE inline A move(A grad, A& square_avg, A& grad_avg, A& sum) const {
    return add_up(direction.move(grad, square_avg, grad_avg), sum);
  }
};

// What flows into RmspropDirection's results -> what flows out to its grad and to its averages. The derivative of the
// root at 0 is taken to be 0, its limit as the gradient goes to 0.
template <class A>
struct RmspropBackward {
  A alpha, rest, eps;

  explicit RmspropBackward(const RmspropNumbers& n)
      : alpha(static_cast<A>(n.alpha)), rest(static_cast<A>(1 - n.alpha)), eps(static_cast<A>(n.eps)) {}

  C10_HOST_DEVICE inline void operator()(A& to_grad, A& to_square_avg, A of_direction, A of_square_avg, A grad,
                                         A new_square_avg) const {
    const A root = std::sqrt(new_square_avg);
    const A over_below = 1 / (root + eps);
    of_square_avg = of_square_avg + of_inside(of_direction, grad, root, over_below);
    to_grad = of_direction * over_below + 2 * rest * grad * of_square_avg;
    to_square_avg = alpha * of_square_avg;
  }

  C10_HOST_DEVICE inline void operator()(A& to_grad, A& to_square_avg, A& to_grad_avg, A of_direction, A of_square_avg,
                                         A of_grad_avg, A grad, A new_square_avg, A new_grad_avg) const {
    const A root = std::sqrt(new_square_avg - new_grad_avg * new_grad_avg);
    const A over_below = 1 / (root + eps);
    const A inside = of_inside(of_direction, grad, root, over_below);
    of_square_avg = of_square_avg + inside;
    of_grad_avg = of_grad_avg - 2 * new_grad_avg * inside;
    to_grad = of_direction * over_below + 2 * rest * grad * of_square_avg + rest * of_grad_avg;
    to_square_avg = alpha * of_square_avg;
    to_grad_avg = alpha * of_grad_avg;
  }

 private:
  // What flows out of the root to what is inside it.
  C10_HOST_DEVICE inline A of_inside(A of_direction, A grad, A root, A over_below) const {
    const A of_root = -of_direction * (grad * over_below * over_below);
    return root == 0 ? A(0) : of_root / (2 * root);
  }
};

}  // namespace todist
