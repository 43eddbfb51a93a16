// Lists of gradients, the state -> RMSprop's step in place; moved parameters and the next state; or their derivatives.
// `run` is that of the file which includes this one: cpu_kernel.h on the CPU, cuda_kernel.h on CUDA.
#pragma once

#include "../arguments.h"
#include "formula.h"

#include <array>
#include <cstddef>
#include <initializer_list>
#include <utility>

namespace todist {
namespace {

// The arguments of an op: of those rows, the ones that are there.
struct Row {
  Argument argument;
  bool there = true;
};

template <size_t N, size_t M>
constexpr std::array<Argument, N> those_of(const std::array<Row, M>& rows) {
  std::array<Argument, N> arguments{};
  size_t n = 0;
  for (const Row& row : rows) {
    if (row.there) {
      arguments[n++] = row.argument;
    }
  }
  return arguments;
}

template <bool kCentered, Momentum kMomentum>
struct StepOp {
  static constexpr const char* kName = "rmsprop_";
  static constexpr bool kSummed = kMomentum != Momentum::kNone;
  static constexpr auto kArguments = those_of<3 + kCentered + kSummed>(std::array<Row, 5>{{
      {{"params", Role::kUpdated}},
      {{"grads", Role::kRead}},
      {{"square_avgs", Role::kUpdated}},
      {{"grad_avgs", Role::kUpdated}, kCentered},
      {{"momentum_buffers", Role::kUpdated}, kSummed},
  }});
  using Numbers = RmspropNumbers;
  template <class A>
  using Formula = RmspropStep<A, kCentered, kMomentum>;
};

template <bool kCentered, Momentum kMomentum>
struct MovedOp {
  static constexpr const char* kName = "rmsprop";
  static constexpr bool kSummed = kMomentum != Momentum::kNone;
  static constexpr size_t kNew = 2 + kCentered + kSummed;
  static constexpr auto kArguments = those_of<2 * kNew + 1>(std::array<Row, 9>{{
      {{"moved", Role::kNew, kNew + 1}},
      {{"new_square_avgs", Role::kNew, kNew + 1}},
      {{"new_grad_avgs", Role::kNew, kNew + 2}, kCentered},
      {{"new_momentum_buffers", Role::kNew, 2 * kNew - 1}, kSummed},
      {{"grads", Role::kRead}},
      {{"square_avgs", Role::kRead}},
      {{"grad_avgs", Role::kRead}, kCentered},
      {{"momentum_buffers", Role::kRead}, kSummed},
      {{"params", Role::kOptional}},
  }});
  using Numbers = RmspropNumbers;
  template <class A>
  using Formula = RmspropMoved<A, kCentered, kMomentum>;
};

template <bool kCentered, Momentum kMomentum>
struct BackwardOp {
  static constexpr const char* kName = "rmsprop_backward";
  static constexpr bool kSummed = kMomentum != Momentum::kNone;
  static constexpr size_t kNew = 2 + kCentered + kSummed;
  static constexpr auto kArguments = those_of<2 * kNew + 2 + kCentered>(std::array<Row, 11>{{
      {{"to_grads", Role::kNew, 2 * kNew}},
      {{"to_square_avgs", Role::kNew, 2 * kNew + 1}},
      {{"to_grad_avgs", Role::kNew, 2 * kNew + 2}, kCentered},
      {{"to_momentum_buffers", Role::kNew, 2 * kNew + 1}, kSummed},
      {{"moved_grads", Role::kRead}},
      {{"square_avg_grads", Role::kOptional}},
      {{"grad_avg_grads", Role::kOptional}, kCentered},
      {{"momentum_buffer_grads", Role::kOptional}, kSummed},
      {{"grads", Role::kRead}},
      {{"square_avgs", Role::kRead}},
      {{"grad_avgs", Role::kRead}, kCentered},
  }});
  using Numbers = RmspropNumbers;
  template <class A>
  using Formula = RmspropBackward<A, kMomentum>;
};

// Calls run_op with the op for this kind of state.
template <template <bool, Momentum> class Op, bool kCentered, class Run>
StableIValue with_momentum(double momentum, bool nesterov, const Run& run_op) {
  if (momentum == 0) {
    return run_op(Op<kCentered, Momentum::kNone>());
  }
  return nesterov ? run_op(Op<kCentered, Momentum::kNesterov>()) : run_op(Op<kCentered, Momentum::kPlain>());
}

template <template <bool, Momentum> class Op, class Run>
StableIValue with_kind(bool centered, double momentum, bool nesterov, const Run& run_op) {
  return centered ? with_momentum<Op, true>(momentum, nesterov, run_op)
                  : with_momentum<Op, false>(momentum, nesterov, run_op);
}

// Of these lists, those that are there are passed on.
template <class Op>
StableIValue run_those(std::initializer_list<std::pair<const List*, bool>> lists, const RmspropNumbers& numbers) {
  Lists<Op> given{};
  size_t n = 0;
  for (const auto& [list, there] : lists) {
    if (there) {
      given[n++] = list;
    }
  }
  return run<Op>(given, [&](size_t) { return numbers; });
}

void check_no_sums(const char* op, const char* name, const List& list, double momentum) {
  if (momentum == 0) {
    check_empty(op, name, list.size(), "`momentum` is 0");
  }
}

void rmsprop_(const List& params, const List& grads, const List& square_avgs, const List& grad_avgs,
              const List& momentum_buffers, double lr, double alpha, double eps, double momentum, bool nesterov,
              double weight_decay, bool maximize) {
  const Arguments arguments{&params, &grads, &square_avgs, &grad_avgs, &momentum_buffers};
  const RmspropNumbers numbers{alpha, eps, momentum, -lr, weight_decay, maximize};
  const bool centered = !grad_avgs.empty();
  const bool summed = momentum != 0;
  check_no_sums("rmsprop_", "momentum_buffers", momentum_buffers, momentum);
  with_kind<StepOp>(centered, momentum, nesterov, [&](auto op) {
    return run_those<decltype(op)>({{&params, true},
                                    {&grads, true},
                                    {&square_avgs, true},
                                    {&grad_avgs, centered},
                                    {&momentum_buffers, summed}},
                                   numbers);
  });
}

StableIValue rmsprop(const List& grads, const List& square_avgs, const List& grad_avgs, const List& momentum_buffers,
                     const List& params, double factor, double alpha, double eps, double momentum, bool nesterov) {
  const Arguments arguments{&grads, &square_avgs, &grad_avgs, &momentum_buffers, &params};
  const RmspropNumbers numbers{alpha, eps, momentum, factor};
  const bool centered = !grad_avgs.empty();
  const bool summed = momentum != 0;
  check_no_sums("rmsprop", "momentum_buffers", momentum_buffers, momentum);
  return with_kind<MovedOp>(centered, momentum, nesterov, [&](auto op) {
    return run_those<decltype(op)>({{&grads, true},
                                    {&square_avgs, true},
                                    {&grad_avgs, centered},
                                    {&momentum_buffers, summed},
                                    {&params, true}},
                                   numbers);
  });
}

StableIValue rmsprop_backward(const List& moved_grads, const List& square_avg_grads, const List& grad_avg_grads,
                              const List& momentum_buffer_grads, const List& grads, const List& square_avgs,
                              const List& grad_avgs, double factor, double alpha, double eps, double momentum,
                              bool nesterov) {
  const Arguments arguments{&moved_grads, &square_avg_grads, &grad_avg_grads, &momentum_buffer_grads,
                            &grads,       &square_avgs,      &grad_avgs};
  const RmspropNumbers numbers{alpha, eps, momentum, factor};
  const bool centered = !grad_avgs.empty();
  const bool summed = momentum != 0;
  check_no_sums("rmsprop_backward", "momentum_buffer_grads", momentum_buffer_grads, momentum);
  if (!centered) {
    check_empty("rmsprop_backward", "grad_avg_grads", grad_avg_grads.size(), "`grad_avgs` is");
  }
  return with_kind<BackwardOp>(centered, momentum, nesterov, [&](auto op) {
    return run_those<decltype(op)>({{&moved_grads, true},
                                    {&square_avg_grads, true},
                                    {&grad_avg_grads, centered},
                                    {&momentum_buffer_grads, summed},
                                    {&grads, true},
                                    {&square_avgs, true},
                                    {&grad_avgs, centered}},
                                   numbers);
  });
}

}  // namespace
}  // namespace todist
