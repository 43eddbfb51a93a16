"""Any regular system → its solution, by generalized minimal residuals.

Saad and Schultz, "GMRES: a generalized minimal residual algorithm for solving nonsymmetric linear systems", 1986.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Unpack

import torch
from torch import Tensor

from torchopt_dist.linear_solve.solver import KrylovOptions, Outcome, Solver, System

__all__ = ["GMRES", "solve_gmres"]


def solve_gmres(*, restart: int = 20, **options: Unpack[KrylovOptions]) -> Solver:
    """Generalized minimal residuals, restarted, for any regular matrix: one product per iteration.

    Args:
        restart: the number of iterations between restarts, and of vectors that are kept in memory.
        options: as in :func:`solve_cg`; ``maxiter`` counts the iterations of all restarts, and ``M`` is applied from
            the right, and need not be symmetric.

    Returns:
        The solver.

    Raises:
        ValueError: ``restart`` is below 1; otherwise as :func:`solve_cg`.
    """
    return GMRES(restart=restart, **options)


@dataclass(frozen=True, kw_only=True)
class GMRES(Solver):
    """The solver that :func:`solve_gmres` makes."""

    restart: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.restart < 1:
            raise ValueError(f"`restart` must be at least 1, got {self.restart}")

    def run(self, system: System) -> Outcome:
        """Solve a batch of systems."""
        b, precondition = system.b, system.precondition or _same
        x = torch.zeros_like(b) if system.start is None else system.start.clone()
        r = b.clone() if system.start is None else b - system.product(x)
        norm = r.norm(dim=-1)
        iterations = torch.zeros(norm.shape, device=norm.device)
        left, failure = system.maxiter, ""
        while left > 0 and bool((active := ~(norm <= system.tolerance)).any()):
            before = norm
            cycle = _cycle(system, precondition, r, norm, min(left, self.restart, b.shape[-1]))
            left -= cycle.steps
            iterations += cycle.steps * active
            x = torch.where(active.unsqueeze(-1), x + cycle.update, x)
            r = b - system.product(x)
            norm = r.norm(dim=-1)
            stuck = active & ~(norm < before * (1 - 1e-6))
            if bool((stuck & ~(norm <= system.tolerance)).any()):
                if not bool((norm < b.norm(dim=-1))[stuck].all()):
                    failure = (
                        "GMRES makes no progress, the matrix is singular, or `restart` is too small for it"
                    )
                break
        return Outcome(x, norm, iterations, failure)


class _Cycle(NamedTuple):
    update: Tensor
    steps: int


def _cycle(
    system: System, precondition: Callable[[Tensor], Tensor], r: Tensor, norm: Tensor, most: int
) -> _Cycle:
    """Build a basis of the Krylov space, and minimize the residual in it."""
    basis = r.new_zeros(*r.shape[:-1], most + 1, r.shape[-1])
    basis[..., 0, :] = _unit(r, norm)
    hessenberg = r.new_zeros(*r.shape[:-1], most + 1, most)
    steps = 0
    for steps in range(1, most + 1):
        w = system.product(precondition(basis[..., steps - 1, :]))
        size = w.norm(dim=-1)
        known = basis[..., :steps, :]
        for _ in range(2):  # once is not enough where rounding errors add up
            part = (known.conj() @ w.unsqueeze(-1)).squeeze(-1)
            w = w - (known.mT @ part.unsqueeze(-1)).squeeze(-1)
            hessenberg[..., :steps, steps - 1] += part
        length = w.norm(dim=-1)
        length = torch.where(length > 10 * torch.finfo(length.dtype).eps * size, length, 0)
        hessenberg[..., steps, steps - 1] = length
        basis[..., steps, :] = _unit(w, length)
        weights, rest = _least_squares(hessenberg[..., : steps + 1, :steps], norm)
        if bool((rest <= system.tolerance).all()) or not bool(length.any()):
            break
    combined = (basis[..., :steps, :].mT @ weights.unsqueeze(-1)).squeeze(-1)
    return _Cycle(precondition(combined), steps)


def _least_squares(hessenberg: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
    """The least-squares solution of ``hessenberg y = (norm, 0, …)``; the matrix need not have full rank."""
    right = torch.zeros_like(hessenberg[..., :1])
    right[..., 0, 0] = norm
    y = torch.linalg.pinv(hessenberg) @ right
    return y.squeeze(-1), (right - hessenberg @ y).squeeze(-1).norm(dim=-1)


def _unit(vector: Tensor, length: Tensor) -> Tensor:
    factor = torch.where(length > 0, 1 / length, 0)
    return vector * factor.unsqueeze(-1)


def _same(vector: Tensor) -> Tensor:
    return vector
