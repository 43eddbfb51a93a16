"""Gradients → parameters moved: optimizers as functions, as torch-like classes and as differentiable classes."""

from torchopt_dist.optim import _former_files
from torchopt_dist.optim.classes import (
    LAMB,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Adan,
    Lion,
    MetaAdadelta,
    MetaAdafactor,
    MetaAdagrad,
    MetaAdam,
    MetaAdamax,
    MetaAdamW,
    MetaAdan,
    MetaLAMB,
    MetaLion,
    MetaMuon,
    MetaRAdam,
    MetaRMSprop,
    MetaSGD,
    Muon,
    RAdam,
    RMSprop,
)
from torchopt_dist.optim.differentiable import DifferentiableOptimizer, differentiable
from torchopt_dist.optim.functional_optimizer import FuncOptimizer
from torchopt_dist.optim.meta_optimizer import MetaOptimizer
from torchopt_dist.optim.optimizer import Optimizer
from torchopt_dist.transform.adadelta import adadelta
from torchopt_dist.transform.adafactor import adafactor
from torchopt_dist.transform.adagrad import adagrad
from torchopt_dist.transform.adam import adam, adamw
from torchopt_dist.transform.adamax import adamax
from torchopt_dist.transform.adan import adan
from torchopt_dist.transform.apply_updates import apply_updates
from torchopt_dist.transform.lamb import lamb
from torchopt_dist.transform.lion import lion
from torchopt_dist.transform.muon import muon
from torchopt_dist.transform.radam import radam
from torchopt_dist.transform.rmsprop import rmsprop
from torchopt_dist.transform.sgd import sgd

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

_former_files.register()
