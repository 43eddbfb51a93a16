"""TorchOpt's order of positional arguments, options and side effects, where they differ → torchopt_dist's."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import torchopt_dist as todist
from torchopt_dist import linear_solve, pytree, transform
from torchopt_dist.core.types import Numeric, ScalarOrSchedule

__all__ = ["SGD", "MetaSGD", "UninitializedState", "nan_to_num", "solve_inv"]


class UninitializedState(NamedTuple):
    """A state that an optimizer has not initialized; torchopt_dist makes none."""


class SGD(todist.SGD):
    """:class:`torchopt_dist.SGD`, with ``weight_decay`` before ``dampening``."""

    def __init__(
        self,
        params: Any,
        lr: ScalarOrSchedule,
        momentum: Numeric = 0.0,
        weight_decay: Numeric = 0.0,
        dampening: Numeric = 0.0,
        nesterov: bool = False,
        maximize: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            dampening=dampening,
            nesterov=nesterov,
            maximize=maximize,
            **options,
        )


class MetaSGD(todist.MetaSGD):
    """:class:`torchopt_dist.MetaSGD`, with ``weight_decay`` before ``dampening``."""

    def __init__(
        self,
        module: Any,
        lr: ScalarOrSchedule,
        momentum: Numeric = 0.0,
        weight_decay: Numeric = 0.0,
        dampening: Numeric = 0.0,
        nesterov: bool = False,
        moment_requires_grad: bool = True,
        maximize: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(
            module,
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            dampening=dampening,
            nesterov=nesterov,
            moment_requires_grad=moment_requires_grad,
            maximize=maximize,
            **options,
        )


def nan_to_num(
    nan: float = 0.0, posinf: float | None = None, neginf: float | None = None
) -> transform.GradientTransformation:
    """The link of ``torchopt_dist.transform``; with ``inplace=True`` it overwrites the gradients that it is given."""
    init, update = transform.nan_to_num(nan, posinf, neginf)
    return transform.GradientTransformation(init, partial(_overwriting, update))


def _overwriting(update: Any, updates: Any, state: Any, *, params: Any = None, inplace: bool = True) -> Any:
    new, state = update(updates, state, params=params, inplace=inplace)
    if inplace:
        with torch.no_grad():
            new = pytree.tree_map(_written, updates, new)
    return new, state


def _written(old: Any, new: Any) -> Any:
    return old.copy_(new) if isinstance(old, Tensor) else new


def solve_inv(*, ridge: Numeric | None = None, ns: bool = False, **options: Any) -> linear_solve.Solver:
    """:func:`torchopt_dist.linear_solve.solve_inv`, or with ``ns`` the Neumann series, which takes the options."""
    if ns:
        return linear_solve.solve_neumann(ridge=ridge, **options)
    return linear_solve.solve_inv(ridge=ridge)
