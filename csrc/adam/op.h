// Lists of gradients, Adam's averages -> moved parameters or directions, and new averages; or their derivatives.
// `run` is that of the file which includes this one: cpu_kernel.h on the CPU, cuda_kernel.h on CUDA.
#pragma once

#include "../arguments.h"
#include "formula.h"

namespace todist {
namespace {

struct DirectionOp {
  static constexpr const char* kName = "adam";
  static constexpr std::array<Argument, 7> kArguments{{{"moved", Role::kNew, 4},
                                                       {"new_exp_avgs", Role::kNew, 4},
                                                       {"new_exp_avg_sqs", Role::kNew, 5},
                                                       {"grads", Role::kRead},
                                                       {"exp_avgs", Role::kRead},
                                                       {"exp_avg_sqs", Role::kRead},
                                                       {"params", Role::kOptional}}};
  using Numbers = AdamNumbers;
  template <class A>
  using Formula = AdamDirection<A>;
};

struct BackwardOp {
  static constexpr const char* kName = "adam_backward";
  static constexpr std::array<Argument, 9> kArguments{{{"to_grads", Role::kNew, 6},
                                                       {"to_exp_avgs", Role::kNew, 7},
                                                       {"to_exp_avg_sqs", Role::kNew, 8},
                                                       {"moved_grads", Role::kRead},
                                                       {"exp_avg_grads", Role::kOptional},
                                                       {"exp_avg_sq_grads", Role::kOptional},
                                                       {"grads", Role::kRead},
                                                       {"exp_avgs", Role::kRead},
                                                       {"exp_avg_sqs", Role::kRead}}};
  using Numbers = AdamNumbers;
  template <class A>
  using Formula = AdamBackward<A>;
};

struct DecayedBackwardOp {
  static constexpr const char* kName = "adam_backward";
  static constexpr std::array<Argument, 11> kArguments{{{"to_grads", Role::kNew, 7},
                                                        {"to_exp_avgs", Role::kNew, 8},
                                                        {"to_exp_avg_sqs", Role::kNew, 9},
                                                        {"to_params", Role::kNew, 10},
                                                        {"moved_grads", Role::kRead},
                                                        {"exp_avg_grads", Role::kOptional},
                                                        {"exp_avg_sq_grads", Role::kOptional},
                                                        {"grads", Role::kRead},
                                                        {"exp_avgs", Role::kRead},
                                                        {"exp_avg_sqs", Role::kRead},
                                                        {"params", Role::kRead}}};
  using Numbers = AdamNumbers;
  template <class A>
  using Formula = AdamBackward<A>;
};

// Row i of `corrections` completes what all tensors have in common.
template <class Op>
StableIValue run_with(const Lists<Op>& lists, const AdamNumbers& common, const Tensor& corrections) {
  const View view(corrections, Access::kRead);
  const std::array<int64_t, 2> shape{static_cast<int64_t>(lists[0]->size()), 2};
  check_numbers(Op::kName, "corrections", view, {shape.data(), shape.size()});
  return run<Op>(lists, [&](size_t i) {
    const double* row = static_cast<const double*>(view.data) + static_cast<int64_t>(i) * view.strides[0];
    AdamNumbers numbers = common;
    numbers.correction1 = row[0];
    numbers.correction2 = row[view.strides[1]];
    return numbers;
  });
}

StableIValue adam(const List& grads, const List& exp_avgs, const List& exp_avg_sqs, const List& params,
                  const Tensor& corrections, double factor, double kept, double b1, double b2, double eps,
                  double eps_root, double weight_decay, bool maximize) {
  const Arguments arguments{&grads, &exp_avgs, &exp_avg_sqs, &params};
  const AdamNumbers numbers{b1, b2, eps, eps_root, 1, 1, factor, kept, weight_decay, maximize};
  TODIST_CHECK(weight_decay == 0 || params.size() == grads.size(), "adam",
               ": `params` must have the length of `grads` where `weight_decay` is not 0, ", grads.size(), "; got ",
               params.size());
  return run_with<DirectionOp>({&grads, &exp_avgs, &exp_avg_sqs, &params}, numbers, corrections);
}

StableIValue adam_backward(const List& moved_grads, const List& exp_avg_grads, const List& exp_avg_sq_grads,
                           const List& grads, const List& exp_avgs, const List& exp_avg_sqs, const List& params,
                           const Tensor& corrections, double factor, double kept, double b1, double b2, double eps,
                           double eps_root, double weight_decay, bool maximize) {
  const Arguments arguments{&moved_grads, &exp_avg_grads, &exp_avg_sq_grads, &grads,
                            &exp_avgs,    &exp_avg_sqs,   &params};
  const AdamNumbers numbers{b1, b2, eps, eps_root, 1, 1, factor, kept, weight_decay, maximize};
  if (weight_decay != 0) {
    return run_with<DecayedBackwardOp>(
        {&moved_grads, &exp_avg_grads, &exp_avg_sq_grads, &grads, &exp_avgs, &exp_avg_sqs, &params}, numbers,
        corrections);
  }
  check_empty("adam_backward", "params", params.size(), "`weight_decay` is 0");
  return run_with<BackwardOp>({&moved_grads, &exp_avg_grads, &exp_avg_sq_grads, &grads, &exp_avgs, &exp_avg_sqs}, numbers,
                              corrections);
}

}  // namespace
}  // namespace todist
