"""Any regular system → its solution, by stabilized biconjugate gradients.

Van der Vorst, "Bi-CGSTAB: a fast and smoothly converging variant of Bi-CG for the solution of nonsymmetric linear
systems", 1992.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor

from torchopt_dist.linear_solve.solver import KrylovOptions, Outcome, Solver, System

__all__ = ["BiCGSTAB", "solve_bicgstab"]


def solve_bicgstab(**options: Unpack[KrylovOptions]) -> Solver:
    """Stabilized biconjugate gradients, for any regular matrix: two products per iteration, and few vectors in memory.

    Args:
        options: as in :func:`solve_cg`; ``M`` is applied from the right, and need not be symmetric.

    Returns:
        The solver.
    """
    return BiCGSTAB(**options)


@dataclass(frozen=True, kw_only=True)
class BiCGSTAB(Solver):
    """The solver that :func:`solve_bicgstab` makes."""

    def run(self, system: System) -> Outcome:
        """Solve a batch of systems."""
        b, precondition = system.b, system.precondition or _same
        x = torch.zeros_like(b) if system.start is None else system.start.clone()
        r = b.clone() if system.start is None else b - system.product(x)
        shadow, p, v = r.clone(), torch.zeros_like(r), torch.zeros_like(r)
        rho = alpha = omega = torch.ones_like(_dot(r, r))
        norm = r.norm(dim=-1)
        best, best_norm = x, norm
        iterations = torch.zeros(norm.shape, device=norm.device)
        failure = ""
        for _ in range(system.maxiter):
            active = ~(norm <= system.tolerance)
            if not bool(active.any()):
                break
            previous, rho = rho, _dot(shadow, r)
            lost = active & (rho.abs() <= torch.finfo(norm.dtype).eps * shadow.norm(dim=-1) * norm)
            # The shadow is orthogonal to the residual: begin again from here.
            shadow = torch.where(lost.unsqueeze(-1), r, shadow)
            rho = torch.where(lost, _dot(r, r), rho)
            beta = torch.where(active & ~lost, rho / previous * (alpha / omega), 0)
            p = r + beta.unsqueeze(-1) * (p - omega.unsqueeze(-1) * v)
            ahead = precondition(p)
            v = system.product(ahead)
            along = _dot(shadow, v)
            if bool((active & (along == 0)).any()):
                failure = "BiCGSTAB broke down, as it does on singular and on skew-symmetric matrices"
                break
            alpha = torch.where(active, rho / along, 0)
            s = r - alpha.unsqueeze(-1) * v
            smoother = precondition(s)
            t = system.product(smoother)
            size = _dot(t, t)
            omega = torch.where(active & (size != 0), _dot(t, s) / size, 0)
            x = x + alpha.unsqueeze(-1) * ahead + omega.unsqueeze(-1) * smoother
            r = s - omega.unsqueeze(-1) * t
            norm = r.norm(dim=-1)
            iterations += active
            better = norm < best_norm
            best = torch.where(better.unsqueeze(-1), x, best)
            best_norm = torch.where(better, norm, best_norm)
            if bool((active & ~(norm <= system.tolerance) & (omega == 0)).any()):
                failure = "BiCGSTAB broke down, as it does on singular and on skew-symmetric matrices"
                break
            if not bool((norm < 1e12 * b.norm(dim=-1).clamp(min=1e-30)).all()):
                break  # it diverges, or is nan
        if bool((best_norm <= system.tolerance).all()):
            failure = ""
        return Outcome(best, best_norm, iterations, failure)


def _dot(x: Tensor, y: Tensor) -> Tensor:
    return torch.linalg.vecdot(x, y)


def _same(vector: Tensor) -> Tensor:
    return vector
