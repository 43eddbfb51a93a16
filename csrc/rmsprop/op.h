// Lists of gradients, running averages -> RMSprop's step in place; directions and new averages; or their derivatives.
// `run` is that of the file which includes this one: kernel.h on the CPU, cuda_kernel.h on CUDA.
#pragma once

#include "../arguments.h"
#include "formula.h"

namespace todist {
namespace {

constexpr Argument kParams{"params", Role::kUpdated};
constexpr Argument kGrads{"grads", Role::kRead};
constexpr Argument kSquareAvgs{"square_avgs", Role::kUpdated};
constexpr Argument kGradAvgs{"grad_avgs", Role::kUpdated};
constexpr Argument kSums{"momentum_buffers", Role::kUpdated};

template <bool kCentered, bool kMomentum>
constexpr auto step_arguments() {
  if constexpr (kCentered && kMomentum) {
    return std::array<Argument, 5>{kParams, kGrads, kSquareAvgs, kGradAvgs, kSums};
  } else if constexpr (kCentered || kMomentum) {
    return std::array<Argument, 4>{kParams, kGrads, kSquareAvgs, kCentered ? kGradAvgs : kSums};
  } else {
    return std::array<Argument, 3>{kParams, kGrads, kSquareAvgs};
  }
}

template <bool kCentered, bool kMomentum>
struct StepOp {
  static constexpr const char* kName = "rmsprop_";
  static constexpr auto kArguments = step_arguments<kCentered, kMomentum>();
  using Numbers = RmspropNumbers;
  template <class A>
  using Formula = RmspropStep<A, kCentered, kMomentum>;
};

struct DirectionOp {
  static constexpr const char* kName = "rmsprop";
  static constexpr std::array<Argument, 4> kArguments{{{"directions", Role::kNew, 3},
                                                       {"new_square_avgs", Role::kNew, 3},
                                                       {"grads", Role::kRead},
                                                       {"square_avgs", Role::kRead}}};
  using Numbers = RmspropNumbers;
  template <class A>
  using Formula = RmspropDirection<A>;
};

struct CenteredDirectionOp {
  static constexpr const char* kName = "rmsprop";
  static constexpr std::array<Argument, 6> kArguments{{{"directions", Role::kNew, 4},
                                                       {"new_square_avgs", Role::kNew, 4},
                                                       {"new_grad_avgs", Role::kNew, 5},
                                                       {"grads", Role::kRead},
                                                       {"square_avgs", Role::kRead},
                                                       {"grad_avgs", Role::kRead}}};
  using Numbers = RmspropNumbers;
  template <class A>
  using Formula = RmspropDirection<A>;
};

struct BackwardOp {
  static constexpr const char* kName = "rmsprop_backward";
  static constexpr std::array<Argument, 6> kArguments{{{"to_grads", Role::kNew, 4},
                                                       {"to_square_avgs", Role::kNew, 5},
                                                       {"direction_grads", Role::kRead},
                                                       {"square_avg_grads", Role::kOptional},
                                                       {"grads", Role::kRead},
                                                       {"new_square_avgs", Role::kRead}}};
  using Numbers = RmspropNumbers;
  template <class A>
  using Formula = RmspropBackward<A>;
};

struct CenteredBackwardOp {
  static constexpr const char* kName = "rmsprop_backward";
  static constexpr std::array<Argument, 9> kArguments{{{"to_grads", Role::kNew, 6},
                                                       {"to_square_avgs", Role::kNew, 7},
                                                       {"to_grad_avgs", Role::kNew, 8},
                                                       {"direction_grads", Role::kRead},
                                                       {"square_avg_grads", Role::kOptional},
                                                       {"grad_avg_grads", Role::kOptional},
                                                       {"grads", Role::kRead},
                                                       {"new_square_avgs", Role::kRead},
                                                       {"new_grad_avgs", Role::kRead}}};
  using Numbers = RmspropNumbers;
  template <class A>
  using Formula = RmspropBackward<A>;
};

void rmsprop_(const List& params, const List& grads, const List& square_avgs, const List& grad_avgs,
              const List& momentum_buffers, double lr, double alpha, double eps, double momentum, bool nesterov,
              double weight_decay, bool maximize) {
  const Arguments arguments{&params, &grads, &square_avgs, &grad_avgs, &momentum_buffers};
  const RmspropNumbers numbers{alpha, eps, lr, momentum, weight_decay, nesterov, maximize};
  const auto same = [&](size_t) { return numbers; };
  const bool centered = !grad_avgs.empty();
  if (momentum == 0) {
    check_empty("rmsprop_", "momentum_buffers", momentum_buffers.size(), "`momentum` is 0");
  }
  if (centered && momentum != 0) {
    run<StepOp<true, true>>({&params, &grads, &square_avgs, &grad_avgs, &momentum_buffers}, same);
  } else if (centered) {
    run<StepOp<true, false>>({&params, &grads, &square_avgs, &grad_avgs}, same);
  } else if (momentum != 0) {
    run<StepOp<false, true>>({&params, &grads, &square_avgs, &momentum_buffers}, same);
  } else {
    run<StepOp<false, false>>({&params, &grads, &square_avgs}, same);
  }
}

StableIValue rmsprop(const List& grads, const List& square_avgs, const List& grad_avgs, double alpha, double eps) {
  const Arguments arguments{&grads, &square_avgs, &grad_avgs};
  const auto same = [numbers = RmspropNumbers{alpha, eps}](size_t) { return numbers; };
  if (grad_avgs.empty()) {
    return run<DirectionOp>({&grads, &square_avgs}, same);
  }
  return run<CenteredDirectionOp>({&grads, &square_avgs, &grad_avgs}, same);
}

StableIValue rmsprop_backward(const List& direction_grads, const List& square_avg_grads, const List& grad_avg_grads,
                      const List& grads, const List& new_square_avgs, const List& new_grad_avgs, double alpha,
                      double eps) {
  const Arguments arguments{&direction_grads, &square_avg_grads, &grad_avg_grads,
                            &grads,           &new_square_avgs,  &new_grad_avgs};
  const auto same = [numbers = RmspropNumbers{alpha, eps}](size_t) { return numbers; };
  if (new_grad_avgs.empty()) {
    check_empty("rmsprop_backward", "grad_avg_grads", grad_avg_grads.size(), "`new_grad_avgs` is");
    return run<BackwardOp>({&direction_grads, &square_avg_grads, &grads, &new_square_avgs}, same);
  }
  return run<CenteredBackwardOp>(
      {&direction_grads, &square_avg_grads, &grad_avg_grads, &grads, &new_square_avgs, &new_grad_avgs}, same);
}

}  // namespace
}  // namespace todist
