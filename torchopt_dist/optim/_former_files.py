"""Names of files that optimizers and their states were in → modules of these names, which pickles from then ask for."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec

from torchopt_dist.optim import classes

__all__ = ["register"]

_BEFORE = {
    "adadelta": ("optim.adadelta", "transform.scale_by_adadelta"),
    "adafactor": ("optim.adafactor",),
    "adagrad": ("optim.adagrad", "transform.scale_by_rss"),
    "adam": ("optim.adam", "optim.adamw", "transform.scale_by_adam"),
    "adamax": ("optim.adamax", "transform.scale_by_adamax"),
    "adan": ("optim.adan", "transform.scale_by_adan"),
    "lamb": ("optim.lamb",),
    "lion": ("optim.lion", "transform.scale_by_lion"),
    "muon": ("optim.muon",),
    "radam": ("optim.radam", "transform.scale_by_radam"),
    "rmsprop": ("optim.rmsprop", "transform.scale_by_rms"),
    "sgd": ("optim.sgd",),
}
"""A file of ``transform`` → the files in which its contents and its classes were."""


def register() -> None:
    """Make modules of the former names, which have what is in the files of now."""
    for file, names in _BEFORE.items():
        algorithm = importlib.import_module(f"torchopt_dist.transform.{file}")
        own = {name: getattr(classes, name) for name in classes.__all__}
        own = {name: x for name, x in own.items() if x.transformation.__module__ == algorithm.__name__}
        for name in names:
            former = module_from_spec(ModuleSpec(f"torchopt_dist.{name}", None))
            vars(former).update({key: x for key, x in vars(algorithm).items() if not key.startswith("__")})
            vars(former).update(own, __all__=[*algorithm.__all__, *own])
            sys.modules[f"torchopt_dist.{name}"] = former
