// Lists of gradients, running sums, parameters -> moved parameters and new sums; or their derivatives.
// `run` is that of the file which includes this one: cpu_kernel.h on the CPU, cuda_kernel.h on CUDA.
#pragma once

#include "../arguments.h"
#include "formula.h"

namespace todist {
namespace {

template <template <class> class F>
struct SgdOp {
  using Numbers = SgdNumbers;
  template <class A>
  using Formula = F<A>;
};

struct PlainMoveOp : SgdOp<SgdMove> {
  static constexpr const char* kName = "sgd";
  static constexpr std::array<Argument, 3> kArguments{
      {{"moved", Role::kNew, 2}, {"grads", Role::kRead}, {"params", Role::kOptional}}};
};

struct MomentumMoveOp : SgdOp<SgdMove> {
  static constexpr const char* kName = "sgd";
  static constexpr std::array<Argument, 5> kArguments{{{"moved", Role::kNew, 4},
                                                       {"new_momentum_buffers", Role::kNew, 3},
                                                       {"grads", Role::kRead},
                                                       {"momentum_buffers", Role::kRead},
                                                       {"params", Role::kOptional}}};
};

struct PlainBackwardOp : SgdOp<SgdBackward> {
  static constexpr const char* kName = "sgd_backward";
  static constexpr std::array<Argument, 2> kArguments{{{"to_grads", Role::kNew, 1}, {"moved_grads", Role::kRead}}};
};

struct DecayedBackwardOp : SgdOp<SgdBackward> {
  static constexpr const char* kName = "sgd_backward";
  static constexpr std::array<Argument, 3> kArguments{
      {{"to_grads", Role::kNew, 2}, {"to_params", Role::kNew, 2}, {"moved_grads", Role::kRead}}};
};

struct MomentumBackwardOp : SgdOp<SgdBackward> {
  static constexpr const char* kName = "sgd_backward";
  static constexpr std::array<Argument, 4> kArguments{{{"to_grads", Role::kNew, 2},
                                                       {"to_momentum_buffers", Role::kNew, 2},
                                                       {"moved_grads", Role::kRead},
                                                       {"momentum_buffer_grads", Role::kOptional}}};
};

struct DecayedMomentumBackwardOp : SgdOp<SgdBackward> {
  static constexpr const char* kName = "sgd_backward";
  static constexpr std::array<Argument, 5> kArguments{{{"to_grads", Role::kNew, 3},
                                                       {"to_momentum_buffers", Role::kNew, 3},
                                                       {"to_params", Role::kNew, 3},
                                                       {"moved_grads", Role::kRead},
                                                       {"momentum_buffer_grads", Role::kOptional}}};
};

// Entry i of `taken` completes what all tensors have in common. Without momentum there is none.
template <class Op>
StableIValue run_with(const Lists<Op>& lists, const SgdNumbers& common, const Tensor& taken) {
  const View view(taken, Access::kRead);
  const auto length = static_cast<int64_t>(common.momentum == 0 ? 0 : lists[0]->size());
  check_numbers(Op::kName, "taken", view, {&length, 1});
  return run<Op>(lists, [&](size_t i) {
    SgdNumbers numbers = common;
    if (common.momentum != 0) {
      numbers.taken = static_cast<const double*>(view.data)[static_cast<int64_t>(i) * view.strides[0]];
    }
    return numbers;
  });
}

void check_no_sums(const char* op, const char* list, const List& sums) {
  check_empty(op, list, sums.size(), "`momentum` is 0");
}

StableIValue sgd(const List& grads, const List& momentum_buffers, const List& params, const Tensor& taken, double lr,
                 double momentum, bool nesterov, double weight_decay, bool maximize) {
  const Arguments arguments{&grads, &momentum_buffers, &params};
  const SgdNumbers numbers{lr, momentum, weight_decay, nesterov, maximize};
  TODIST_CHECK(weight_decay == 0 || params.size() == grads.size(), PlainMoveOp::kName,
               ": `params` must have the length of `grads` where `weight_decay` is not 0, ", grads.size(), "; got ",
               params.size());
  if (momentum == 0) {
    check_no_sums(PlainMoveOp::kName, "momentum_buffers", momentum_buffers);
    return run_with<PlainMoveOp>({&grads, &params}, numbers, taken);
  }
  return run_with<MomentumMoveOp>({&grads, &momentum_buffers, &params}, numbers, taken);
}

StableIValue sgd_backward(const List& moved_grads, const List& momentum_buffer_grads, const Tensor& taken, double lr,
                          double momentum, bool nesterov, double weight_decay, bool maximize) {
  const Arguments arguments{&moved_grads, &momentum_buffer_grads};
  const SgdNumbers numbers{lr, momentum, weight_decay, nesterov, maximize};
  if (momentum == 0) {
    check_no_sums(PlainBackwardOp::kName, "momentum_buffer_grads", momentum_buffer_grads);
    return weight_decay == 0 ? run_with<PlainBackwardOp>({&moved_grads}, numbers, taken)
                             : run_with<DecayedBackwardOp>({&moved_grads}, numbers, taken);
  }
  return weight_decay == 0
             ? run_with<MomentumBackwardOp>({&moved_grads, &momentum_buffer_grads}, numbers, taken)
             : run_with<DecayedMomentumBackwardOp>({&moved_grads, &momentum_buffer_grads}, numbers, taken);
}

}  // namespace
}  // namespace todist
