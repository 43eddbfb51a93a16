"""Losses or gradients → moved parameters: the optimizers, each with three faces."""

from torchopt_dist.optim.apply_updates import apply_updates
from torchopt_dist.optim.functional_optimizer import FuncOptimizer
from torchopt_dist.optim.meta_optimizer import MetaOptimizer
from torchopt_dist.optim.optimizer import Optimizer
from torchopt_dist.optim.sgd import SGD, MetaSGD, sgd

__all__ = ["SGD", "FuncOptimizer", "MetaOptimizer", "MetaSGD", "Optimizer", "apply_updates", "sgd"]
