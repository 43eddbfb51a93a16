"""``solver(function, init)`` → a fixed point, or a root, and how accurate it is.

A solver is a subclass of :class:`NonlinearSolver` in a file of its own, whose ``steps`` works on a plain vector. Its
steps are made of differentiable operations, so a solution can be unrolled; ``custom_fixed_point`` and ``custom_root``
in ``torchopt_dist.diff.implicit`` give it the implicit gradient instead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchopt_dist import pytree
from torchopt_dist._torch_private import transforms_are_active
from torchopt_dist._types import TensorTree
from torchopt_dist.linear_solve.solver import NotConverged, SolverInfo, check_limits, report

__all__ = ["NonlinearSolver"]


@dataclass(frozen=True, kw_only=True)
class NonlinearSolver(ABC):
    """A solver of ``x = function(x)``, or of ``function(x) = 0``.

    Under ``vmap`` each sample has a solution of its own. All samples then make ``maxiter`` iterations, since
    convergence cannot be tested there; a sample that has converged stays where it is. ``solves_for_root`` tells which
    of the two equations a solver solves.
    """

    rtol: float = 1e-5
    atol: float = 1e-8
    maxiter: int = 100
    not_converged: NotConverged = "warn"
    solves_for_root: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_limits(self.rtol, self.atol, self.maxiter, self.not_converged)

    def __call__(self, function: Callable[[TensorTree], TensorTree], init: TensorTree) -> Any:
        """Solve; as :meth:`with_info`, without the information."""
        return self.with_info(function, init)[0]

    def with_info(
        self, function: Callable[[TensorTree], TensorTree], init: TensorTree
    ) -> tuple[Any, SolverInfo]:
        """Solve.

        Args:
            function: a tree → a tree of the same structure and shapes.
            init: where to start, a tree of floating-point tensors.

        Returns:
            The solution, a tree like ``init``, and a ``SolverInfo``. The residual is the norm of ``function(x) - x``,
            or of ``function(x)`` for a root; a solution has converged where that is at most ``rtol · ‖x‖ + atol``.

        Raises:
            torch.linalg.LinAlgError: the iterations diverged, or, if ``not_converged='raise'``, did not converge.
            TypeError: ``init`` has a leaf that is not a floating-point tensor.
            ValueError: ``function`` returns another structure or other shapes.
        """
        # A compiler goes on after the solve, as it does after an inner loop.
        solve = torch.compiler.disable(self._with_info) if torch.compiler.is_compiling() else self._with_info
        made: tuple[Any, SolverInfo] = solve(function, init)
        return made

    def _with_info(
        self, function: Callable[[TensorTree], TensorTree], init: TensorTree
    ) -> tuple[Any, SolverInfo]:
        leaves, spec = pytree.flatten(init)
        for leaf in leaves:
            if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
                got = leaf.dtype if isinstance(leaf, Tensor) else type(leaf).__name__
                raise TypeError(f"`init` must be a tree of floating-point tensors, got a leaf of {got}")
        if not leaves:
            raise ValueError(f"`init` must have at least one tensor, got {init!r:.80}")
        sizes = [leaf.numel() for leaf in leaves]

        def tree(vector: Tensor) -> Any:
            parts = zip(vector.split(sizes), leaves, strict=True)
            return pytree.unflatten(spec, [part.reshape(leaf.shape).to(leaf) for part, leaf in parts])

        def of_vector(vector: Tensor) -> Tensor:
            value = pytree.flatten_like(spec, function(tree(vector)), "function(x)", "init")
            for got, leaf in zip(value, leaves, strict=True):
                if got.shape != leaf.shape:
                    raise ValueError(
                        f"`function` must return the shapes that it takes: a leaf of shape {tuple(leaf.shape)} "
                        f"became one of shape {tuple(got.shape)}"
                    )
            return torch.cat([leaf.reshape(-1).to(start) for leaf in value])

        dtype = leaves[0].dtype
        for leaf in leaves:
            dtype = torch.promote_types(dtype, leaf.dtype)
        start = torch.cat([leaf.reshape(-1).to(leaves[0].device, dtype) for leaf in leaves])
        x, info = self._run(of_vector, start)
        return tree(x), info

    @abstractmethod
    def steps(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Any:
        """A generator: yields a point and the residual there, a vector, before each step."""

    def _run(self, function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, SolverInfo]:
        blind = transforms_are_active()
        solution = residual = x
        done = iterations = torch.zeros((), dtype=torch.bool, device=x.device)
        iterations = iterations.long()
        for number, (point, error) in enumerate(self.steps(function, x)):
            solution, residual = torch.where(done, solution, point), torch.where(done, residual, error)
            iterations = torch.where(done, iterations, number)
            norm = residual.detach().norm()
            done = norm <= self.rtol * solution.detach().norm() + self.atol
            if number == self.maxiter or (not blind and (bool(done) or not bool(norm.isfinite()))):
                break
        norm = residual.detach().norm()
        if not blind and not bool(done):
            self._complain(int(iterations), float(norm))
        return solution, SolverInfo(norm, iterations, done)

    def _complain(self, iterations: int, norm: float) -> None:
        says = (
            f"{type(self).__name__} stopped after {iterations} iterations with a residual of {norm:.2g}; the "
            f"limits are rtol={self.rtol:g}, atol={self.atol:g}, maxiter={self.maxiter}: raise one of them, or start "
            "nearer to the solution"
        )
        if not norm < float("inf"):
            raise torch.linalg.LinAlgError(f"{type(self).__name__} diverged: {says}")
        report(says, self.not_converged)
