"""A function → its root, by Broyden's method, without derivatives.

Broyden, "A class of methods for solving nonlinear simultaneous equations", 1965.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor

from torchopt_dist.nonlinear_solve.solver import NonlinearSolver, NonlinearSolverOptions

__all__ = ["Broyden", "broyden"]


def broyden(
    *, scale: float = 1.0, history: int = 20, **options: Unpack[NonlinearSolverOptions]
) -> NonlinearSolver:
    """Broyden's good method for ``function(x) = 0``: learn the inverse Jacobian from the steps themselves.

    Args:
        scale: the initial inverse Jacobian is ``scale`` times the identity; not 0. With a contraction ``f``, use 1 for
            the function ``x - f(x)`` and -1 for ``f(x) - x``.
        history: the number of corrections, of two vectors each, after which all are dropped; at least 1.
        options: as in :func:`newton`, but for ``maxiter``, which is 100, if not given.

    Returns:
        The solver.

    Raises:
        ValueError: a number is out of its range.
    """
    return Broyden(scale=scale, history=history, **options)


@dataclass(frozen=True, kw_only=True)
class Broyden(NonlinearSolver):
    """The solver that :func:`broyden` makes."""

    scale: float = 1.0
    history: int = 20
    solves_for_root = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale == 0:
            raise ValueError("`scale` must not be 0")
        if self.history < 1:
            raise ValueError(f"`history` must be at least 1, got {self.history}")

    def steps(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Step by step; the inverse is ``scale · I + Σ u vᵀ``."""
        value = function(x)
        corrections: list[tuple[Tensor, Tensor]] = []
        while True:
            yield x, value
            step = -self._times(corrections, value)
            x = x + step
            following = function(x)
            change = self._times(corrections, following - value)
            value = following
            if len(corrections) == self.history:
                corrections = []
                continue
            left = self.scale * step
            for u, v in corrections:
                left = left + v * (u @ step)
            length = step @ change
            usable = length.abs() > torch.finfo(length.dtype).tiny
            factor = torch.where(usable, 1 / torch.where(usable, length, 1), 0)
            corrections = [*corrections, ((step - change) * factor, left)]

    def _times(self, corrections: list[tuple[Tensor, Tensor]], vector: Tensor) -> Tensor:
        product = self.scale * vector
        for u, v in corrections:
            product = product + u * (v @ vector)
        return product
