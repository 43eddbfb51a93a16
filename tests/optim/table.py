"""Every optimizer, a row each, with what the tests that are run for each need to know about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import torchopt_dist as todist
from tests.optim import references
from tests.optim.adan_reference import Adan as ReferenceAdan


@dataclass(frozen=True)
class Row:
    """An optimizer."""

    function: Callable[..., Any]
    """The functional constructor."""
    plain: type
    """The class that moves parameters in place."""
    meta: type
    """The differentiable class."""
    twin: type[torch.optim.Optimizer]
    """Torch's own, or an independent one beside these tests; its arguments have the same names."""
    options: dict[str, dict[str, Any]]
    """Settings that are all tried, by a short name."""
    tensors: dict[str, Any] = field(default_factory=dict)
    """Every hyper-parameter that may be a tensor, with a value."""

    def make_twin(self, params: Any, setting: str) -> torch.optim.Optimizer:
        """The twin with the same options; which implementation is chosen is no matter of the formula."""
        options = {name: value for name, value in self.options[setting].items() if name != "fused"}
        return self.twin(params, **options)


def _row(name: str, twin: type, **rest: Any) -> Row:
    faces = (getattr(todist, face) for face in (name.lower(), name, f"Meta{name}"))
    return Row(*faces, twin, **rest)


ADAM = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 0.01, "weight_decay": 0.1}

ROWS = {
    row.plain.__name__: row
    for row in (
        _row(
            "SGD",
            torch.optim.SGD,
            options={
                "plain": {"lr": 0.05},
                "momentum": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1},
                "dampening": {"lr": 0.05, "momentum": 0.9, "dampening": 0.3, "maximize": True},
                "nesterov": {"lr": 0.05, "momentum": 0.9, "nesterov": True},
                "formula": {
                    "lr": 0.05,
                    "momentum": 0.9,
                    "dampening": 0.3,
                    "weight_decay": 0.1,
                    "fused": False,
                },
            },
            tensors={"lr": 0.1, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.3},
        ),
        _row(
            "Adam",
            torch.optim.Adam,
            options={
                "defaults": {"lr": 0.01},
                "all": {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1, "maximize": True},
                "amsgrad": {"lr": 0.02, "betas": (0.8, 0.5), "weight_decay": 0.1, "amsgrad": True},
                "formula": {"lr": 0.02, "weight_decay": 0.1, "fused": False},
            },
            tensors={**ADAM, "eps_root": 0.02},
        ),
        _row(
            "AdamW",
            torch.optim.AdamW,
            options={
                "defaults": {"lr": 0.01},
                "all": {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.3, "maximize": True},
                "amsgrad": {"lr": 0.02, "betas": (0.8, 0.5), "amsgrad": True, "maximize": True},
                "formula": {"lr": 0.02, "weight_decay": 0.3, "fused": False},
            },
            tensors={**ADAM, "eps_root": 0.02},
        ),
        _row(
            "Adamax",
            torch.optim.Adamax,
            options={
                "defaults": {"lr": 0.01, "eps": 1e-8},
                "all": {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1, "maximize": True},
            },
            tensors=ADAM,
        ),
        _row(
            "RAdam",
            torch.optim.RAdam,
            options={
                "defaults": {"lr": 0.01, "eps": 1e-8},
                "all": {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1, "maximize": True},
            },
            tensors=ADAM,
        ),
        _row(
            "RMSprop",
            torch.optim.RMSprop,
            options={
                "defaults": {"lr": 0.01},
                "momentum": {
                    "lr": 0.005,
                    "alpha": 0.9,
                    "momentum": 0.8,
                    "weight_decay": 0.1,
                    "maximize": True,
                },
                "centered": {"lr": 0.01, "alpha": 0.9, "centered": True, "eps": 1e-3},
                "formula": {"lr": 0.005, "alpha": 0.9, "centered": True, "momentum": 0.8, "fused": False},
            },
            tensors={"lr": 0.05, "alpha": 0.9, "eps": 0.01, "weight_decay": 0.1, "momentum": 0.7},
        ),
        _row(
            "Adagrad",
            torch.optim.Adagrad,
            options={
                "defaults": {"lr": 0.05},
                "all": {
                    "lr": 0.1,
                    "lr_decay": 0.1,
                    "weight_decay": 0.1,
                    "initial_accumulator_value": 0.1,
                    "eps": 1e-3,
                    "maximize": True,
                },
            },
            tensors={"lr": 0.1, "lr_decay": 0.2, "weight_decay": 0.1, "eps": 0.01},
        ),
        _row(
            "Adadelta",
            torch.optim.Adadelta,
            options={
                "defaults": {"lr": 1.0},
                "all": {"lr": 2.0, "rho": 0.8, "eps": 1e-3, "weight_decay": 0.1, "maximize": True},
            },
            tensors={"lr": 0.5, "rho": 0.8, "eps": 0.01, "weight_decay": 0.1},
        ),
        _row(
            "Adan",
            ReferenceAdan,
            options={
                "defaults": {"lr": 0.01},
                "all": {
                    "lr": 0.02,
                    "betas": (0.9, 0.8, 0.95),
                    "eps": 1e-3,
                    "weight_decay": 0.3,
                    "maximize": True,
                },
            },
            tensors={"lr": 0.1, "betas": (0.9, 0.8, 0.95), "eps": 0.01, "weight_decay": 0.1},
        ),
        _row(
            "Lion",
            references.Lion,
            options={
                "defaults": {"lr": 0.01},
                "all": {"lr": 0.02, "betas": (0.8, 0.95), "weight_decay": 0.3, "maximize": True},
            },
            tensors={"lr": 0.1, "betas": (0.8, 0.9), "weight_decay": 0.1},
        ),
        _row(
            "LAMB",
            references.LAMB,
            options={
                "defaults": {"lr": 0.01},
                "all": {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.3, "maximize": True},
            },
            tensors=ADAM,
        ),
    )
}
CASES = [(name, setting) for name, row in ROWS.items() for setting in row.options]
