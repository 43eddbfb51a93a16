"""``solver(matvec, b)`` → ``x`` with ``matvec(x) = b``, differentiable to any order without a record of the iterations.

A solver is a subclass of :class:`Solver` in a file of its own, whose ``run`` works on plain vectors. This file has what
all solvers share: trees become vectors, the derivative is one more solve with the transposed matrix, a ``vmap`` becomes
a batch of vectors, and a solve that fails raises or warns.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias, TypedDict

import torch
from torch import Tensor

from torchopt_dist import pytree
from torchopt_dist.core.rows import in_rows
from torchopt_dist.core.types import Numeric, TensorTree
from torchopt_dist.core.uncompiled import uncompiled
from torchopt_dist.core.vjp import Tensors, refuse_forward_mode, vjp
from torchopt_dist.linear_solve._closure import convert
from torchopt_dist.linear_solve._operator import BatchedOperator, LinearOperator, RidgeOperator, VectorLayout

__all__ = [
    "ConvergenceWarning",
    "KrylovOptions",
    "NotConverged",
    "Outcome",
    "Solver",
    "SolverInfo",
    "SolverOptions",
    "System",
    "jacobi",
]

NotConverged: TypeAlias = Literal["warn", "raise", "ignore"]
"""What a solve that has not reached its tolerance does with a result that is still useful."""
Preconditioner: TypeAlias = Callable[[TensorTree], TensorTree] | Literal["jacobi"] | None


class SolverOptions(TypedDict, total=False):
    """What all iterative solvers take; :func:`solve_cg` says what each is."""

    ridge: Numeric | None
    rtol: float
    atol: float
    maxiter: int | None
    not_converged: NotConverged


class KrylovOptions(SolverOptions, total=False):
    """What those take that can start elsewhere than at zeros, and be preconditioned."""

    init: TensorTree
    M: Preconditioner


class ConvergenceWarning(UserWarning):
    """A solver stopped before it reached its tolerance; the message has the residual and the tolerance."""


class SolverInfo(NamedTuple):
    """Residual and iterations of a solve. Under ``vmap`` every field is batched as the solution is."""

    residual: Tensor
    """The norm of what is left over, ``‖b - A x‖``."""
    iterations: Tensor
    """How many iterations were made; an integer."""
    converged: Tensor
    """Whether ``residual`` is within the tolerance."""


class Outcome(NamedTuple):
    """What a solver's ``run`` returns: ``x`` of shape (…, n), and a number for each system, of shape (…)."""

    x: Tensor
    residual: Tensor
    iterations: Tensor
    failure: str = ""
    """Why it broke down, if it did."""


@dataclass(frozen=True)
class System:
    """A batch of linear systems, as a solver's ``run`` sees it: vectors of shape (…, n)."""

    product: Callable[[Tensor], Tensor]
    b: Tensor
    start: Tensor | None
    precondition: Callable[[Tensor], Tensor] | None
    tolerance: Tensor
    """``max(rtol · ‖b‖, atol)``, of shape (…)."""
    maxiter: int


@dataclass(frozen=True, kw_only=True)
class Solver(ABC):
    """A linear solver: ``solver(matvec, b)`` is the solution, ``solver.with_info(matvec, b)`` tells how it was found.

    Solutions are differentiable with regard to ``b`` and to whatever ``matvec`` depends on, to any order, under
    autograd and under ``torch.func``; ``vmap`` solves a batch at once. The derivative is that of the solution, not of
    the iterations, so if the solution is inaccurate, the gradient is, too.
    """

    symmetric: ClassVar[bool] = False
    """The matrix is its own transpose."""

    ridge: Numeric | None = None
    init: TensorTree = field(default=None, repr=False)
    rtol: float = 1e-5
    atol: float = 0.0
    maxiter: int | None = None
    not_converged: NotConverged = "warn"
    M: Preconditioner = None

    def __post_init__(self) -> None:
        check_limits(self.rtol, self.atol, self.maxiter, self.not_converged)
        if isinstance(self.ridge, Tensor):
            if self.ridge.numel() != 1:
                raise ValueError(
                    f"`ridge` as a tensor must have one element, got shape {tuple(self.ridge.shape)}"
                )
        elif self.ridge is not None and not self.ridge >= 0:
            raise ValueError(f"`ridge` must be at least 0, got {self.ridge}")
        if self.M is not None and self.M != "jacobi" and not callable(self.M):
            raise TypeError(f"`M` must be a function, 'jacobi' or None, got {self.M!r:.80}")

    def __call__(self, matvec: Callable[[TensorTree], TensorTree], b: TensorTree) -> Any:
        """Solve ``matvec(x) = b``; as :meth:`with_info`, without the information."""
        return self.with_info(matvec, b)[0]

    @uncompiled
    def with_info(self, matvec: Callable[[TensorTree], TensorTree], b: TensorTree) -> tuple[Any, SolverInfo]:
        """Solve ``matvec(x) = b``.

        Args:
            matvec: the product with a square matrix: a tree → a tree of the same structure and shapes. It may close
                over tensors and modules, and those that it depends on get gradients. It is called again in
                backward, and must then take the same tensors.
            b: a tree of tensors.

        Returns:
            The solution, a tree like ``b``, and a :class:`SolverInfo`.

        Raises:
            torch.linalg.LinAlgError: the method broke down, or its result is worse than zeros.
            TypeError: ``b`` has a leaf that is not a floating-point tensor, or both real and complex ones, or
                ``matvec`` is not a function.
            ValueError: ``matvec`` returns another structure or other shapes; or, in backward, it takes a tensor with a
                graph that it did not take before: pass ``functools.partial(f, tensor)``.
            NotImplementedError: it is called under ``torch.func.jvp`` or another forward-mode derivative.
        """
        leaves, spec = check_vector(b, "b")
        operator, params = convert(matvec, spec, leaves)
        x, info = self.solve(operator, params, leaves, spec)
        operator.function.settle()  # later products are those of the same matrix, whatever names mean by then
        return pytree.unflatten(spec, x), info

    def solve(
        self, operator: LinearOperator, params: Tensors, b: Tensors, spec: pytree.PyTreeSpec
    ) -> tuple[Tensors, SolverInfo]:
        """Solve for an operator and the leaves of ``b``; ``spec`` is the structure of ``b``."""
        damped = operator
        if self.ridge is not None:
            ridge = torch.as_tensor(self.ridge, dtype=b[0].dtype, device=b[0].device).reshape(())
            damped, params = RidgeOperator(operator), [ridge, *params]
        start: Tensors = []
        if self.init is not None:
            start = pytree.flatten_like(spec, self.init, "init", "b")
        return solve_implicitly(self, spec, damped, params, b, start)

    @abstractmethod
    def run(self, system: System) -> Outcome:
        """Solve a batch of systems, without a graph."""

    def forward(
        self,
        spec: pytree.PyTreeSpec,
        operator: LinearOperator,
        params: Tensors,
        b: Tensors,
        start: Tensors,
    ) -> tuple[Tensors, SolverInfo]:
        """Lists of leaves → vectors → the solution's leaves; warns or raises if the solve has failed."""
        layout = VectorLayout(b, len(operator.batch_shape))
        prepared = operator.prepared(params, b)

        def product(vector: Tensor) -> Tensor:
            return layout.vector(prepared(layout.leaves(vector))).detach()

        right = layout.vector(b)
        size = torch.linalg.vector_norm(right, dim=-1)
        tolerance = (self.rtol * size).clamp(min=self.atol)
        system = System(
            product,
            right,
            layout.vector(start) if start else None,
            self._preconditioner(product, layout, spec, len(operator.batch_shape)),
            tolerance,
            self.maxiter or self.default_maxiter(right.shape[-1]),
        )
        found = self.run(system) if right.numel() else Outcome(right, size, torch.zeros_like(size))
        # Rounding errors are no failure: a tolerance below them is out of reach.
        rounding = 10 * torch.finfo(right.dtype).eps * math.sqrt(right.shape[-1]) * size
        converged = found.residual <= torch.maximum(tolerance, rounding)
        self._judge(found, converged, size, system)
        info = SolverInfo(found.residual, found.iterations.long(), converged)
        return layout.leaves(found.x, like=b), info

    def default_maxiter(self, elements: int) -> int:
        """The default of ``maxiter`` for vectors of so many elements."""
        return 10 * elements

    def _preconditioner(
        self,
        product: Callable[[Tensor], Tensor],
        layout: VectorLayout,
        spec: pytree.PyTreeSpec,
        batch_dims: int,
    ) -> Callable[[Tensor], Tensor] | None:
        if self.M is None:
            return None
        if self.M == "jacobi":
            columns = torch.eye(layout.elements, dtype=layout.dtype, device=layout.device)
            shape = layout.batch_shape
            parts = [product(column.expand(*shape, -1))[..., i] for i, column in enumerate(columns)]
            diagonal = torch.stack(parts, dim=-1)
            if not bool(diagonal.all()):
                raise torch.linalg.LinAlgError(
                    "`M='jacobi'` needs a matrix without zeros on its diagonal, got one with "
                    f"{int((diagonal == 0).sum())}"
                )
            return lambda vector: vector / diagonal
        function: Any = self.M

        def one(leaves: Tensors) -> Tensors:
            return pytree.flatten_like(spec, function(pytree.unflatten(spec, leaves)), "M(b)", "b")

        for _ in range(batch_dims):
            one = torch.vmap(one)
        return lambda vector: layout.vector(one(layout.leaves(vector)))

    def _judge(self, found: Outcome, converged: Tensor, size: Tensor, system: System) -> None:
        if bool(converged.all()):
            return
        worst = (found.residual / size).masked_fill(converged, 0).nan_to_num(nan=math.inf).max()
        name = type(self).__name__
        among = (
            "" if converged.dim() == 0 else f" in {int((~converged).sum())} of {converged.numel()} systems"
        )
        stopped = (
            f"{name} stopped{among} after {int(found.iterations.max())} iterations with a residual of "
            f"{worst:.2g} of ‖b‖"
        )
        if found.failure:
            raise torch.linalg.LinAlgError(f"{found.failure}: {stopped}; give another solver, or a `ridge`")
        says = (
            f"{stopped}; the limits are rtol={self.rtol:g}, atol={self.atol:g}, maxiter={system.maxiter}: "
            "raise one of them, or give a preconditioner `M`, where the solver takes one, or a `ridge`"
        )
        if not worst < 1:
            raise torch.linalg.LinAlgError(f"{name} diverged, its result is worse than zeros: {says}")
        report(says, self.not_converged)


def jacobi(diagonal: TensorTree) -> Callable[[TensorTree], TensorTree]:
    """Make Jacobi's preconditioner from a diagonal that is known.

    Args:
        diagonal: a tree like ``b``, without zeros.

    Returns:
        A preconditioner, for the argument ``M`` of a solver.

    Example:
        >>> import torch
        >>> jacobi({"w": torch.tensor([2.0, 4.0])})({"w": torch.ones(2)})
        {'w': tensor([0.5000, 0.2500])}
    """
    return partial(_divided, diagonal)


def _divided(diagonal: TensorTree, vector: TensorTree) -> TensorTree:
    return pytree.tree_truediv(vector, diagonal)


def report(says: str, not_converged: NotConverged) -> None:
    """Warn of a solution that is less accurate than was asked for, or raise, or ignore it."""
    if not_converged == "raise":
        raise torch.linalg.LinAlgError(says)
    if not_converged == "warn":
        warnings.warn(says, ConvergenceWarning, stacklevel=2)


def check_limits(rtol: float, atol: float, maxiter: int | None, not_converged: str) -> None:
    """Check the tolerances, the number of iterations and ``not_converged``.

    Raises:
        ValueError: an argument is out of its range.
    """
    for name, value in (("rtol", rtol), ("atol", atol)):
        if not value >= 0:
            raise ValueError(f"`{name}` must be at least 0, got {value}")
    if maxiter is not None and (isinstance(maxiter, bool) or not isinstance(maxiter, int) or maxiter < 1):
        raise ValueError(f"`maxiter` must be an integer of at least 1, or None, got {maxiter!r}")
    check_not_converged(not_converged)


def check_not_converged(not_converged: str) -> None:
    """Check ``not_converged``.

    Raises:
        ValueError: it is none of the three.
    """
    if not_converged not in ("warn", "raise", "ignore"):
        raise ValueError(f"`not_converged` must be 'warn', 'raise' or 'ignore', got {not_converged!r}")


def check_vector(tree: TensorTree, name: str) -> tuple[Tensors, pytree.PyTreeSpec]:
    """The leaves of a vector, and its structure.

    Raises:
        TypeError: it has leaves that are no floating-point tensors, or both real and complex ones.
        ValueError: it has none.
    """
    leaves, spec = pytree.flatten(tree)
    for leaf in leaves:
        if not isinstance(leaf, Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
            got = leaf.dtype if isinstance(leaf, Tensor) else type(leaf).__name__
            raise TypeError(f"`{name}` must be a tree of floating-point tensors, got a leaf of {got}")
    if not leaves:
        raise ValueError(f"`{name}` must have at least one tensor, got {tree!r:.80}")
    if len({leaf.is_complex() for leaf in leaves}) > 1:
        raise TypeError(
            f"`{name}` must have either real or complex leaves, got both, for which there is no matrix: give "
            "`torch.view_as_real(...)` of the complex ones"
        )
    return leaves, spec


def solve_implicitly(
    solver: Solver,
    spec: pytree.PyTreeSpec,
    operator: LinearOperator,
    params: Tensors,
    b: Tensors,
    start: Tensors,
) -> tuple[Tensors, SolverInfo]:
    """Solve, differentiably with regard to ``params`` and ``b``."""
    *x, residual, iterations, converged = _Solve.apply(
        solver, spec, operator, (len(b), len(start)), *b, *start, *params
    )
    return x, SolverInfo(residual, iterations, converged)


class _Solve(torch.autograd.Function):
    """The solution as a function of the right-hand side and the operator's parameters."""

    apply: ClassVar[Any]

    @staticmethod
    def forward(
        solver: Solver,
        spec: pytree.PyTreeSpec,
        operator: LinearOperator,
        counts: tuple[int, int],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        b, start, params = _parted(tensors, counts)
        x, info = solver.forward(spec, operator, params, b, start)
        return (*x, *info)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.solver, ctx.spec, ctx.operator, ctx.counts = inputs[:4]
        x, info = output[:-3], output[-3:]
        ctx.mark_non_differentiable(*info)
        params = inputs[4 + sum(ctx.counts) :]
        ctx.save_for_backward(*x, *params)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        """There is no forward-mode derivative."""
        refuse_forward_mode()

    @staticmethod
    @in_rows
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Solve ``Aᴴ u = x's gradient``; the gradient of ``b`` is ``u``, and that of ``A`` is ``-u xᴴ``."""
        count, started = ctx.counts
        saved = list(ctx.saved_tensors)  # once: a checkpoint gives them up then
        x, params = saved[:count], saved[count:]
        operator = ctx.operator if ctx.solver.symmetric else ctx.operator.transposed()
        u, _ = solve_implicitly(ctx.solver, ctx.spec, operator, params, list(grads[:count]), [])
        wanted = ctx.needs_input_grad[4 + count + started :]
        of_params: list[Tensor | None] = [None] * len(params)
        if any(wanted):
            of_params = vjp(partial(ctx.operator.apply, vector=x), params, wanted=wanted)[1](
                [-leaf for leaf in u]
            )
        return (*([None] * 4), *u, *([None] * started), *of_params)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[tuple[Tensor, ...], int]:
        """Solve a batch of systems as one system with longer vectors."""
        solver, spec, operator, counts = args[:4]
        tensors = [
            tensor if dim is None else tensor.movedim(dim, 0)
            for tensor, dim in zip(args[4:], in_dims[4:], strict=True)
        ]
        dims = [None if dim is None else 0 for dim in in_dims[4:]]
        vectors = sum(counts)
        for place in range(vectors):
            if dims[place] is None:
                tensors[place] = tensors[place].expand(info.batch_size, *tensors[place].shape)
        batched = BatchedOperator(operator, tuple(dims[vectors:]), info.batch_size)
        return _Solve.apply(solver, spec, batched, counts, *tensors), 0


def _parted(tensors: Sequence[Tensor], counts: tuple[int, int]) -> tuple[Tensors, Tensors, Tensors]:
    count, started = counts
    return (
        list(tensors[:count]),
        list(tensors[count : count + started]),
        list(tensors[count + started :]),
    )
