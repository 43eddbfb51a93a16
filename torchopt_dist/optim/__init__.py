"""Gradients → parameters moved: optimizers as functions, as torch-like classes and as differentiable classes."""

from torchopt_dist.optim.adadelta import Adadelta, MetaAdadelta, adadelta
from torchopt_dist.optim.adafactor import Adafactor, MetaAdafactor, adafactor
from torchopt_dist.optim.adagrad import Adagrad, MetaAdagrad, adagrad
from torchopt_dist.optim.adam import Adam, MetaAdam, adam
from torchopt_dist.optim.adamax import Adamax, MetaAdamax, adamax
from torchopt_dist.optim.adamw import AdamW, MetaAdamW, adamw
from torchopt_dist.optim.adan import Adan, MetaAdan, adan
from torchopt_dist.optim.differentiable import DifferentiableOptimizer, differentiable
from torchopt_dist.optim.functional_optimizer import FuncOptimizer
from torchopt_dist.optim.lamb import LAMB, MetaLAMB, lamb
from torchopt_dist.optim.lion import Lion, MetaLion, lion
from torchopt_dist.optim.meta_optimizer import MetaOptimizer
from torchopt_dist.optim.muon import MetaMuon, Muon, muon
from torchopt_dist.optim.optimizer import Optimizer
from torchopt_dist.optim.radam import MetaRAdam, RAdam, radam
from torchopt_dist.optim.rmsprop import MetaRMSprop, RMSprop, rmsprop
from torchopt_dist.optim.sgd import SGD, MetaSGD, sgd
from torchopt_dist.transform.apply_updates import apply_updates

__all__ = [
    "LAMB",
    "SGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Adan",
    "DifferentiableOptimizer",
    "FuncOptimizer",
    "Lion",
    "MetaAdadelta",
    "MetaAdafactor",
    "MetaAdagrad",
    "MetaAdam",
    "MetaAdamW",
    "MetaAdamax",
    "MetaAdan",
    "MetaLAMB",
    "MetaLion",
    "MetaMuon",
    "MetaOptimizer",
    "MetaRAdam",
    "MetaRMSprop",
    "MetaSGD",
    "Muon",
    "Optimizer",
    "RAdam",
    "RMSprop",
    "adadelta",
    "adafactor",
    "adagrad",
    "adam",
    "adamax",
    "adamw",
    "adan",
    "apply_updates",
    "differentiable",
    "lamb",
    "lion",
    "muon",
    "radam",
    "rmsprop",
    "sgd",
]
