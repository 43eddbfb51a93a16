"""Names of files that optimizers and their states were in → modules of these names, which pickles from then ask for."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

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
        for name in names:
            former = ModuleType(f"torchopt_dist.{name}", algorithm.__doc__)
            for module in (algorithm, classes):
                vars(former).update({key: x for key, x in vars(module).items() if not key.startswith("__")})
            sys.modules[former.__name__] = former
