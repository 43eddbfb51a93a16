"""A contraction → its fixed point, by repeated application."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from torchopt_dist.core.types import LinearSolver
from torchopt_dist.linear_solve.solver import NotConverged
from torchopt_dist.nonlinear_solve.solver import NonlinearSolver

__all__ = ["FixedPointIteration", "fixed_point_iteration"]


def fixed_point_iteration(
    *,
    damping: float = 1.0,
    rtol: float = 1e-5,
    atol: float = 1e-8,
    maxiter: int = 100,
    not_converged: NotConverged = "warn",
    unroll: bool = False,
    solve: LinearSolver | None = None,
) -> NonlinearSolver:
    """Go from ``x`` to ``(1 - damping) · x + damping · function(x)``.

    Args:
        damping: the factor of each step, above 0 and at most 1.
        rtol: relative tolerance: stop when ``‖function(x) - x‖`` is at most ``rtol · ‖x‖ + atol``.
        atol: absolute tolerance; see ``rtol``.
        maxiter: the largest number of iterations.
        not_converged: what to do if the solution is not within the tolerance: ``'warn'``, ``'raise'`` a
            ``torch.linalg.LinAlgError``, or ``'ignore'`` it.
        unroll: differentiate through the iterations instead of the equation. Memory then grows with them, ``init`` gets
            a gradient, and the gradient is as far from the solution's as they are from having converged.
        solve: solves with the transposed Jacobian in a backward pass, such as ``linear_solve.solve_gmres()``, or any
            function ``solve(matvec, b)``; by default ``linear_solve.solve_normal_cg()``.

    Returns:
        The solver: ``solver(function, init)``, ``solver.with_info(function, init)``. The solution is differentiated by
        the equation, with regard to what ``function`` closes over.

    Raises:
        ValueError: a number is out of its range.

    Example:
        >>> import torch
        >>> fixed_point_iteration(rtol=1e-4)(torch.cos, torch.tensor(1.0)).round(decimals=3)
        tensor(0.7390)
    """
    return FixedPointIteration(
        damping=damping,
        rtol=rtol,
        atol=atol,
        maxiter=maxiter,
        not_converged=not_converged,
        unroll=unroll,
        solve=solve,
    )


@dataclass(frozen=True, kw_only=True)
class FixedPointIteration(NonlinearSolver):
    """The solver that :func:`fixed_point_iteration` makes."""

    damping: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.damping <= 1:
            raise ValueError(f"`damping` must be above 0 and at most 1, got {self.damping}")

    def steps(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Step by step."""
        while True:
            error = function(x) - x
            yield x, error
            x = x + self.damping * error
