"""A function → its fixed point, by Anderson's mixing of the last few steps.

Walker and Ni, "Anderson acceleration for fixed-point iterations", 2011.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor

from torchopt_dist.nonlinear_solve.solver import NonlinearSolver, NonlinearSolverOptions

__all__ = ["Anderson", "anderson"]


def anderson(
    *,
    history: int = 5,
    damping: float = 1.0,
    ridge: float = 1e-8,
    **options: Unpack[NonlinearSolverOptions],
) -> NonlinearSolver:
    """Mix the last few steps so that their residual is smallest; takes fewer iterations than the plain iteration.

    Args:
        history: the number of steps that are mixed, and of pairs of vectors that are kept, at least 1.
        damping: as in :func:`fixed_point_iteration`.
        ridge: regularizes the mixing, relative to its matrix; above 0.
        options: as in :func:`fixed_point_iteration`.

    Returns:
        The solver.

    Raises:
        ValueError: a number is out of its range.
    """
    return Anderson(history=history, damping=damping, ridge=ridge, **options)


@dataclass(frozen=True, kw_only=True)
class Anderson(NonlinearSolver):
    """The solver that :func:`anderson` makes."""

    history: int = 5
    damping: float = 1.0
    ridge: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.history < 1:
            raise ValueError(f"`history` must be at least 1, got {self.history}")
        if not 0 < self.damping <= 1:
            raise ValueError(f"`damping` must be above 0 and at most 1, got {self.damping}")
        if not self.ridge > 0:
            raise ValueError(f"`ridge` must be above 0, got {self.ridge}")

    def steps(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Step by step."""
        error = function(x) - x
        moves: list[Tensor] = []
        changes: list[Tensor] = []
        while True:
            yield x, error
            step = self.damping * error
            if changes:
                of_x, of_error = torch.stack(moves), torch.stack(changes)
                gram = of_error @ of_error.mT
                scale = gram.diagonal().sum() + torch.finfo(gram.dtype).tiny
                gram = gram / scale + self.ridge * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
                weights = torch.linalg.solve(gram, of_error @ error / scale)
                step = step - weights @ (of_x + self.damping * of_error)
            following = x + step
            error_there = function(following) - following
            moves = [*moves, following - x][-self.history :]
            changes = [*changes, error_there - error][-self.history :]
            x, error = following, error_there
