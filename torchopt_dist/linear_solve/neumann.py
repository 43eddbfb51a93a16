"""A system whose matrix is near the identity → its solution, by the Neumann series ``alpha · Σ (I - alpha · A)ⁱ b``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

import torch

from torchopt_dist.linear_solve.cg import dot
from torchopt_dist.linear_solve.solver import Outcome, Solver, SolverOptions, System

__all__ = ["NeumannSeries", "solve_neumann"]


def solve_neumann(*, alpha: float | None = None, **options: Unpack[SolverOptions]) -> Solver:
    """Sum the Neumann series ``alpha · Σ (I - alpha · A)ⁱ b`` up to the power ``maxiter``: one product per power.

    It converges where all eigenvalues of ``I - alpha · A`` are inside the unit circle: for a symmetric positive
    definite matrix, where ``alpha`` is below 2 over the largest eigenvalue. Cut off early, it is a cheap approximation
    (Lorraine et al., 2020, https://arxiv.org/abs/1911.02590).

    Args:
        alpha: the factor; 1, if not given.
        options: as in :func:`solve_cg`; ``maxiter`` is the highest power, and 1000, if not given.

    Returns:
        The solver. It raises ``torch.linalg.LinAlgError`` if the series diverges.

    Raises:
        ValueError: ``alpha`` is not above 0; otherwise as :func:`solve_cg`.
    """
    return NeumannSeries(alpha=1.0 if alpha is None else alpha, **options)


@dataclass(frozen=True, kw_only=True)
class NeumannSeries(Solver):
    """The solver that :func:`solve_neumann` makes."""

    alpha: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.alpha > 0:
            raise ValueError(f"`alpha` must be above 0, got {self.alpha}")

    def default_maxiter(self, elements: int) -> int:
        """A fixed number: how many terms a series needs does not depend on the number of elements."""
        return 1000

    def run(self, system: System) -> Outcome:
        """Solve a batch of systems."""
        # The term of power i is alpha times the residual of the sum of those before it.
        r, alpha = system.b.clone(), self.alpha
        x = alpha * r
        norm = start = dot(r, r).sqrt()
        iterations = torch.zeros_like(norm)
        for power in range(system.maxiter + 1):
            r.sub_(system.product(r), alpha=alpha)
            norm = dot(r, r).sqrt()
            if power == system.maxiter or bool((norm <= system.tolerance).all()):
                break
            if not bool((norm <= 1e6 * start).all()):
                break  # it diverges, or is nan
            x.add_(r, alpha=alpha)
            iterations += 1
        return Outcome(x, norm, iterations)
