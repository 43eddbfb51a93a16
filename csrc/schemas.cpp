// Every op's schema, and nothing else. The kernels register themselves next to their code.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(todist, library) {
  library.def(
      "adam(Tensor[] grads, Tensor[] exp_avgs, Tensor[] exp_avg_sqs, Tensor[] params, Tensor corrections, "
      "float factor, float kept, float b1, float b2, float eps, float eps_root, float weight_decay, "
      "bool maximize) -> Tensor[]");
  library.def(
      "adam_backward(Tensor[] moved_grads, Tensor[] exp_avg_grads, Tensor[] exp_avg_sq_grads, "
      "Tensor[] grads, Tensor[] exp_avgs, Tensor[] exp_avg_sqs, Tensor[] params, Tensor corrections, "
      "float factor, float kept, float b1, float b2, float eps, float eps_root, float weight_decay, "
      "bool maximize) -> Tensor[]");

  library.def(
      "sgd(Tensor[] grads, Tensor[] momentum_buffers, Tensor[] params, Tensor taken, "
      "float lr, float momentum, bool nesterov, float weight_decay, bool maximize) -> Tensor[]");
  library.def(
      "sgd_backward(Tensor[] moved_grads, Tensor[] momentum_buffer_grads, Tensor taken, "
      "float lr, float momentum, bool nesterov, float weight_decay, bool maximize) -> Tensor[]");

  library.def(
      "rmsprop_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] square_avgs, Tensor(c!)[] grad_avgs, "
      "Tensor(d!)[] momentum_buffers, float lr, float alpha, float eps, float momentum, bool nesterov, "
      "float weight_decay, bool maximize) -> ()");
  library.def(
      "rmsprop(Tensor[] grads, Tensor[] square_avgs, Tensor[] grad_avgs, Tensor[] momentum_buffers, Tensor[] params, "
      "float factor, float alpha, float eps, float momentum, bool nesterov) -> Tensor[]");
  library.def(
      "rmsprop_backward(Tensor[] moved_grads, Tensor[] square_avg_grads, Tensor[] grad_avg_grads, "
      "Tensor[] momentum_buffer_grads, Tensor[] grads, Tensor[] square_avgs, Tensor[] grad_avgs, "
      "float factor, float alpha, float eps, float momentum, bool nesterov) -> Tensor[]");
}
