// Lists of parameters, gradients, running sums -> a step of stochastic gradient descent in place.
// `run` is that of the file which includes this one: kernel.h on the CPU, cuda_kernel.h on CUDA.
#pragma once

#include "../arguments.h"
#include "formula.h"

namespace todist {
namespace {

constexpr Argument kParams{"params", Role::kUpdated};
constexpr Argument kGrads{"grads", Role::kRead};

struct PlainOp {
  static constexpr const char* kName = "sgd_";
  static constexpr std::array<Argument, 2> kArguments{kParams, kGrads};
  using Numbers = SgdNumbers;
  template <class A>
  using Formula = SgdStep<A>;
};

struct MomentumOp {
  static constexpr const char* kName = "sgd_";
  static constexpr std::array<Argument, 3> kArguments{kParams, kGrads, Argument{"momentum_buffers", Role::kUpdated}};
  using Numbers = SgdNumbers;
  template <class A>
  using Formula = SgdStep<A>;
};

void sgd_(const List& params, const List& grads, const List& momentum_buffers, const Tensor& taken, double lr,
          double momentum, bool nesterov, double weight_decay, bool maximize) {
  const Arguments arguments{&params, &grads, &momentum_buffers};
  const SgdNumbers common{lr, momentum, weight_decay, nesterov, maximize};
  const View view(taken, Access::kRead);
  const auto length = static_cast<int64_t>(momentum == 0 ? 0 : params.size());
  check_numbers(MomentumOp::kName, "taken", view, {&length, 1});
  if (momentum == 0) {
    check_empty(PlainOp::kName, "momentum_buffers", momentum_buffers.size(), "`momentum` is 0");
    run<PlainOp>({&params, &grads}, [&](size_t) { return common; });
    return;
  }
  run<MomentumOp>({&params, &grads, &momentum_buffers}, [&](size_t i) {
    SgdNumbers numbers = common;
    numbers.taken = static_cast<const double*>(view.data)[static_cast<int64_t>(i) * view.strides[0]];
    return numbers;
  });
}

}  // namespace
}  // namespace todist
