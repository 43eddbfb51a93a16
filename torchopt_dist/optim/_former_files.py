"""Names of files in which optimizers, states and schedules were → modules of these names, for pickles from then."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec

from torchopt_dist.optim import classes

__all__ = ["register"]

_BEFORE = {
    "transform.adadelta": ("optim.adadelta", "transform.scale_by_adadelta"),
    "transform.adafactor": ("optim.adafactor",),
    "transform.adagrad": ("optim.adagrad", "transform.scale_by_rss"),
    "transform.adam": ("optim.adam", "optim.adamw", "transform.scale_by_adam"),
    "transform.adamax": ("optim.adamax", "transform.scale_by_adamax"),
    "transform.adan": ("optim.adan", "transform.scale_by_adan"),
    "transform.clip": ("transform.adaptive_grad_clip",),
    "transform.lamb": ("optim.lamb",),
    "transform.lion": ("optim.lion", "transform.scale_by_lion"),
    "transform.muon": ("optim.muon",),
    "transform.radam": ("optim.radam", "transform.scale_by_radam"),
    "transform.rmsprop": ("optim.rmsprop", "transform.scale_by_rms"),
    "transform.sgd": ("optim.sgd",),
    "diff.adjoints.evolution_strategies": ("diff.adjoints.persistent_evolution_strategies",),
    "linear_solve.cg": ("linear_solve.normal_cg",),
    "schedule.joined": ("schedule.cosine", "schedule.join", "schedule.one_cycle"),
    "schedule.transitions": (
        "schedule.cosine",
        "schedule.exponential",
        "schedule.piecewise_constant",
        "schedule.polynomial",
    ),
}
"""A file → the files in which its contents and its classes were."""


def register() -> None:
    """Make modules of the former names, which have what is in the files of now."""
    for file, names in _BEFORE.items():
        algorithm = importlib.import_module(f"torchopt_dist.{file}")
        own = {name: getattr(classes, name) for name in classes.__all__}
        own = {name: x for name, x in own.items() if x.transformation.__module__ == algorithm.__name__}
        for name in names:
            full = f"torchopt_dist.{name}"
            former = sys.modules.setdefault(full, module_from_spec(ModuleSpec(full, None)))
            vars(former).update({key: x for key, x in vars(algorithm).items() if not key.startswith("__")})
            vars(former).update(own, __all__=[*algorithm.__all__, *own])
