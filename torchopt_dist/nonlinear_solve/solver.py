"""``solver(function, init)`` → a fixed point, or a root, and how accurate it is.

A solver is a subclass of :class:`NonlinearSolver` in a file of its own, whose ``steps`` works on a plain vector. A
solution is differentiated by the equation that it solves. The steps are made of differentiable operations, so with
``unroll=True`` it can be differentiated through them instead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, TypedDict

import torch
from torch import Tensor

from torchopt_dist import pytree
from torchopt_dist.core.binding import bind
from torchopt_dist.core.bound import Bound
from torchopt_dist.core.substitution import Substitute, finding
from torchopt_dist.core.types import LinearSolver, TensorTree
from torchopt_dist.core.uncompiled import uncompiled
from torchopt_dist.core.vjp import Tensors
from torchopt_dist.diff.implicit import attach
from torchopt_dist.linear_solve._function import as_solver
from torchopt_dist.linear_solve._operator import LinearOperator, VectorLayout
from torchopt_dist.linear_solve.solver import NotConverged, SolverInfo, check_limits, report
from torchopt_dist.torch_private import transforms_are_active

__all__ = ["NonlinearSolver", "NonlinearSolverInfo", "NonlinearSolverOptions"]


class NonlinearSolverOptions(TypedDict, total=False):
    """What all solvers take; :func:`fixed_point_iteration` says what each is."""

    rtol: float
    atol: float
    maxiter: int
    not_converged: NotConverged
    unroll: bool
    solve: LinearSolver | None


class NonlinearSolverInfo(NamedTuple):
    """Residual and iterations of a solve. Under ``vmap`` the tensors are batched as the solution is."""

    residual: Tensor
    """The norm of ``function(x) - x``, or of ``function(x)`` for a root."""
    iterations: Tensor
    """How many iterations were made; an integer."""
    converged: Tensor
    """Whether ``residual`` is at most ``rtol · ‖x‖ + atol``."""
    backward: list[SolverInfo]
    """What the linear solver has told in each backward pass through the solution so far; empty with ``unroll=True``."""


@dataclass(frozen=True, kw_only=True)
class NonlinearSolver(ABC):
    """A solver of ``x = function(x)``, or of ``function(x) = 0``.

    Under ``vmap`` each sample has a solution of its own. All samples then make ``maxiter`` iterations, since
    convergence cannot be tested there; a sample that has converged stays where it is. ``solves_for_root`` tells which
    of the two equations a solver solves.

    The solution's gradient is that of the equation, to any order: with regard to the tensors that ``function`` closes
    over, and none to ``init``. It is as accurate as the solution. A backward pass is one linear solve, so memory does
    not grow with the iterations. In forward mode there is none.
    """

    rtol: float = 1e-5
    atol: float = 1e-8
    maxiter: int = 100
    not_converged: NotConverged = "warn"
    unroll: bool = False
    solve: LinearSolver | None = field(default=None)
    solves_for_root: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_limits(self.rtol, self.atol, self.maxiter, self.not_converged)
        if not isinstance(self.unroll, bool):
            raise TypeError(f"`unroll` must be True or False, got {self.unroll!r:.80}")
        as_solver(self.solve)

    def __call__(self, function: Callable[[TensorTree], TensorTree], init: TensorTree) -> Any:
        """Solve; as :meth:`with_info`, without the information."""
        return self.with_info(function, init)[0]

    @uncompiled
    def with_info(
        self, function: Callable[[TensorTree], TensorTree], init: TensorTree
    ) -> tuple[Any, NonlinearSolverInfo]:
        """Solve.

        Args:
            function: a tree → a tree of the same structure and shapes.
            init: where to start, a tree of floating-point tensors.

        Returns:
            The solution, a tree like ``init``, and a :class:`NonlinearSolverInfo`.

        Raises:
            torch.linalg.LinAlgError: the iterations diverged, or, if ``not_converged='raise'``, did not converge.
            TypeError: ``init`` has a leaf that is not a floating-point tensor.
            ValueError: ``function`` returns another structure or other shapes, or differentiates what was computed
                before the call.
        """
        leaves, spec = pytree.flatten(init)
        for leaf in leaves:
            if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
                got = leaf.dtype if isinstance(leaf, Tensor) else type(leaf).__name__
                raise TypeError(f"`init` must be a tree of floating-point tensors, got a leaf of {got}")
        if not leaves:
            raise ValueError(f"`init` must have at least one tensor, got {init!r:.80}")
        layout = VectorLayout(leaves, 0)
        start = layout.vector(leaves)

        def tree(vector: Tensor) -> Any:
            return pytree.unflatten(spec, layout.leaves(vector, like=leaves))

        def of_vector(vector: Tensor) -> Tensor:
            x = pytree.unflatten(spec, layout.leaves(vector))
            value = pytree.flatten_like(spec, function(x), "function(x)", "init")
            for got, leaf in zip(value, leaves, strict=True):
                if got.shape != leaf.shape:
                    raise ValueError(
                        f"`function` must return the shapes that it takes: a leaf of shape {tuple(leaf.shape)} "
                        f"became one of shape {tuple(got.shape)}"
                    )
            return layout.vector(value).to(start)

        backward: list[SolverInfo] = []
        if self.unroll or not torch.is_grad_enabled():
            x, info = self._run(of_vector, start, backward)
            return tree(x), info
        with torch.no_grad():
            x, info = self._run(of_vector, start, backward)
        return self._connected(bind(function), tree(x), _Noting(as_solver(self.solve), backward)), info

    def _connected(self, function: Bound, solution: TensorTree, solver: Any) -> Any:
        """The solution, connected to the tensors that the function takes from outside."""
        leaves, spec = pytree.flatten(solution)
        point = [leaf.detach() for leaf in leaves]
        trial = finding(point, function.tensors, "function")
        with torch.enable_grad(), trial:
            value = function(pytree.unflatten(spec, point))
        found, unseen = trial.used_by(pytree.flatten(value)[0])
        if trial.follows_graph:
            raise ValueError(
                "`function` must not differentiate what was computed before the solver's call, since the solution's "
                "gradient is taken by the equation, with other tensors in these places: compute that inside of "
                "`function`, or give the solver `unroll=True`"
            )
        if unseen:
            raise ValueError(
                f"`function` takes a tensor of shape {tuple(unseen[0].shape)} that requires grad in a way that cannot "
                "be seen, so there would be no gradient for it: give the solver `unroll=True`"
            )
        if not found:
            return solution

        def residual(x: TensorTree, others: list[Tensor]) -> TensorTree:
            with Substitute(found, others):
                value = function(x)
            return value if self.solves_for_root else pytree.tree_sub(x, value)

        function.settle()
        return attach(residual, solution, [found], {}, [0], solver)

    def _check_in_transform(self) -> None:
        """Raise :class:`ValueError` if the solver does not run inside a ``torch.func`` transform."""
        return

    @abstractmethod
    def steps(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Any:
        """A generator: yields a point and the residual there, a vector, before each step."""

    def _run(
        self, function: Callable[[Tensor], Tensor], x: Tensor, backward: list[SolverInfo]
    ) -> tuple[Tensor, NonlinearSolverInfo]:
        if blind := transforms_are_active():
            self._check_in_transform()
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
        return solution, NonlinearSolverInfo(norm, iterations, done, backward)

    def _complain(self, iterations: int, norm: float) -> None:
        says = (
            f"{type(self).__name__} stopped after {iterations} iterations with a residual of {norm:.2g}; the "
            f"limits are rtol={self.rtol:g}, atol={self.atol:g}, maxiter={self.maxiter}: raise one of them, or start "
            "nearer to the solution"
        )
        if not norm < float("inf"):
            raise torch.linalg.LinAlgError(f"{type(self).__name__} diverged: {says}")
        report(says, self.not_converged)


class _Noting:
    """A linear solver, which notes what it tells of each solve."""

    def __init__(self, solver: Any, told: list[SolverInfo]) -> None:
        self._solver, self._told = solver, told

    def solve(
        self, operator: LinearOperator, params: Tensors, b: Tensors, spec: pytree.PyTreeSpec
    ) -> tuple[Tensors, SolverInfo]:
        x, info = self._solver.solve(operator, params, b, spec)
        self._told.append(info)
        return x, info
