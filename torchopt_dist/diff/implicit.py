"""A function that solves an equation → the same function, with the solution's exact gradient.

Where ``F(x, θ) = 0`` the solution's derivative is ``-(∂F/∂x)⁻¹ ∂F/∂θ``, however it was found: the implicit function
theorem. A backward pass is one linear solve with products of the transposed Jacobian, so neither memory nor the
gradient depend on the iterations. See Blondel et al., "Efficient and modular implicit differentiation", 2022.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, ParamSpec, TypeAlias

import torch
from torch import Tensor

from torchopt_dist import pytree
from torchopt_dist.core import vmap
from torchopt_dist.core.binding import bind
from torchopt_dist.core.rows import in_rows
from torchopt_dist.core.second_order import refuse_left_out
from torchopt_dist.core.types import LinearSolver, OptionalTensor, TensorTree
from torchopt_dist.core.uncompiled import uncompiled
from torchopt_dist.core.vjp import (
    Tensors,
    has_derivative,
    may_be_differentiated,
    pull,
    pulled_back,
    refuse_forward_mode,
    vjp,
)
from torchopt_dist.linear_solve._function import as_solver
from torchopt_dist.linear_solve._operator import LinearOperator, Product, TransposedJacobian
from torchopt_dist.linear_solve.solver import Solver

__all__ = ["Adjoint", "custom_fixed_point", "custom_root"]

P = ParamSpec("P")

Adjoint: TypeAlias = Literal["implicit", "unrolled"]
"""How a gradient is taken: from the equation that the solution fulfils, or through the steps that led there."""


def custom_root(
    optimality_fn: Callable[..., TensorTree],
    argnums: int | Sequence[int],
    has_aux: bool = False,
    solve: LinearSolver | None = None,
    *,
    adjoint: Adjoint = "implicit",
) -> Callable[[Callable[P, Any]], Callable[P, Any]]:
    """Decorate a solver ``solver(init, *args)``: its solution ``x`` fulfils ``optimality_fn(x, *args) = 0``.

    For a minimum the optimality function is the objective's gradient. If the solver has found a solution, the gradients
    are exact to any order, under ``torch.func`` and ``vmap`` as well. An optimality function under ``parallelize`` is
    evaluated on the workers: by one call, and by one backward pass through that call for each product that the linear
    solver asks for.

    Args:
        optimality_fn: the solution and the solver's other arguments → a tree of the solution's structure and shapes.
        argnums: positions of the solver's arguments that get a gradient; these are trees of tensors. The initial guess,
            position 0, has no gradient.
        has_aux: whether the solver returns a pair ``(solution, aux)``; ``aux`` may be anything and has no gradient.
        solve: the linear solver, from ``torchopt_dist.linear_solve``, or any function ``solve(matvec, b)``;
            ``solve_normal_cg()``, if not given. For a minimum ``solve_cg()`` is enough, since a Hessian is symmetric.
        adjoint: how the gradient is taken: ``'implicit'``, or ``'unrolled'`` through the solver's own steps, which
            then must be differentiable.

    Returns:
        The decorator. The decorated solver takes the same arguments, by position or by keyword, and runs on detached
        ones.

    Raises:
        ValueError: ``argnums`` has a position below 1, or one that a call does not fill; ``adjoint`` is unknown; or, in
            backward, the optimality function returns another structure or other shapes than the solution's.
        TypeError: an argument has the wrong type, or the solution has a leaf that is not a floating-point tensor.

    Example:
        >>> import torch
        >>> @custom_root(lambda x, a: x**2 - a, argnums=1)
        ... def square_root(x, a):
        ...     for _ in range(20):
        ...         x = (x + a / x) / 2
        ...     return x
        >>> a = torch.tensor(9.0, requires_grad=True)
        >>> torch.autograd.grad(square_root(torch.tensor(1.0), a), a)[0]  # 1 / (2 · 3)
        tensor(0.1667)
    """
    if not callable(optimality_fn):
        raise TypeError(f"`optimality_fn` must be a function, got {type(optimality_fn).__name__}")
    places = _positions(argnums)
    solver = as_solver(solve)
    if adjoint not in ("implicit", "unrolled"):
        raise ValueError(f"`adjoint` must be 'implicit' or 'unrolled', got {adjoint!r}")

    def decorate(function: Callable[P, Any]) -> Callable[P, Any]:
        if not callable(function):
            raise TypeError(f"`custom_root` decorates a function, got {type(function).__name__}")

        @functools.wraps(function)
        def solved(*args: P.args, **kwargs: P.kwargs) -> Any:
            positional, named = _bound(function, args, kwargs)
            if max(places) >= len(positional):
                raise ValueError(
                    f"`argnums` must be positions among the {len(positional)} arguments of the solver, "
                    f"got {max(places)}"
                )
            if adjoint == "unrolled":
                return function(*positional, **named)
            first, *others = positional
            result = function(_cut(first, keep=True), *_cut(others), **_cut(named))
            if has_aux and not (isinstance(result, tuple) and len(result) == 2):
                raise TypeError(f"with `has_aux` the solver must return a pair, got {type(result).__name__}")
            solution, *aux = result if has_aux else (result,)
            equation = bind(optimality_fn)
            equation.settle()
            attached = attach(equation, solution, others, named, [n - 1 for n in places], solver)
            return (attached, *aux) if has_aux else attached

        return solved

    return decorate


def custom_fixed_point(
    fixed_point_fn: Callable[..., TensorTree],
    argnums: int | Sequence[int],
    has_aux: bool = False,
    solve: LinearSolver | None = None,
    *,
    adjoint: Adjoint = "implicit",
) -> Callable[[Callable[P, Any]], Callable[P, Any]]:
    """Decorate a solver ``solver(init, *args)``: its solution ``x`` fulfils ``x = fixed_point_fn(x, *args)``.

    All else is as in :func:`custom_root`, whose optimality function is ``x - fixed_point_fn(x, *args)`` here. Where the
    fixed-point iteration converges, ``solve=linear_solve.solve_neumann()`` converges, too.

    Args:
        fixed_point_fn: the solution and the solver's other arguments → a tree of the solution's structure and shapes.
        argnums: as in :func:`custom_root`.
        has_aux: as in :func:`custom_root`.
        solve: as in :func:`custom_root`.
        adjoint: as in :func:`custom_root`.

    Returns:
        The decorator.

    Raises:
        ValueError: as in :func:`custom_root`.
        TypeError: as in :func:`custom_root`.
    """
    if not callable(fixed_point_fn):
        raise TypeError(f"`fixed_point_fn` must be a function, got {type(fixed_point_fn).__name__}")
    return custom_root(
        functools.partial(_step_back, fixed_point_fn), argnums, has_aux, solve, adjoint=adjoint
    )


def _step_back(fixed_point_fn: Callable[..., Any], x: TensorTree, /, *args: Any, **kwargs: Any) -> Any:
    return pytree.tree_sub(x, fixed_point_fn(x, *args, **kwargs))


class Found(NamedTuple):
    """What a backward pass has found; the leaves of trees, complex ones as pairs of real numbers."""

    solution: Tensors
    """The solution."""
    residual: Sequence[Tensor]
    """The optimality function there."""
    outer: Tensors
    """The gradient of the solution."""
    adjoint: Tensors
    """What the linear solver has made of it."""
    others: list[Any]
    """The other arguments of the optimality function."""
    unused: list[int]
    """Places of tensors that were to get a gradient, and that the optimality function does not use: those of the
    arguments that get gradients are counted first, and one after another."""


Look: TypeAlias = Callable[[Found], None]


@uncompiled
def attach(
    optimality_fn: Callable[..., TensorTree],
    solution: TensorTree,
    others: Sequence[Any],
    named: dict[str, Any],
    places: Sequence[int],
    solver: Solver,
    look: Look | None = None,
    batch: tuple[int, ...] = (),
) -> Any:
    """Connect a solution with the arguments that it depends on.

    Args:
        optimality_fn: called as ``optimality_fn(solution, *others, **named)``.
        solution: a tree of tensors.
        others: positional arguments.
        named: keyword arguments.
        places: positions among ``others`` that get a gradient.
        solver: the linear solver.
        look: is shown what each backward pass has found. With it, a tensor that ``optimality_fn`` does not use gets no
            gradient where that can be seen, which is outside of ``torch.func``; without it, zeros.
        batch: the leading dimensions of the solution and of the function's values, if these are many equations, each
            for its own part of the solution; the linear solver then gets as many systems.

    Returns:
        A tree with the values of ``solution``.
    """
    x, spec = pytree.flatten(solution)
    for leaf in x:
        if not has_derivative(leaf):
            got = leaf.dtype if isinstance(leaf, Tensor) else type(leaf).__name__
            raise TypeError(f"the solution must be a tree of floating-point tensors, got a leaf of {got}")
    everything: Any = [list(others), named]
    leaves, arguments = pytree.flatten(everything)
    counts = [len(pytree.flatten(other)[0]) for other in others]
    wanted = [place in places for place, count in enumerate(counts) for _ in range(count)]
    wanted += [False] * (len(leaves) - len(wanted))
    ours = [n for n, leaf in enumerate(leaves) if has_derivative(leaf) and wanted[n]]
    fixed = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and n not in set(ours)]
    tensors = [leaves[n] for n in ours] + [leaves[n].detach() for n in fixed]
    rest = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    paired = list(map(Tensor.is_complex, x))
    equation = _Equation(optimality_fn, spec, arguments, rest, [*ours, *fixed], paired, look, batch)
    detached = _real_pairs(list(map(Tensor.detach, x)))
    made = _Root.apply(equation, solver, len(x), *detached, *tensors)
    return pytree.unflatten(spec, _complex_again(made, paired))


@dataclass(frozen=True)
class _Equation:
    """``F(x, tensors)`` of lists: the optimality function as a function of all tensors among its arguments."""

    function: Callable[..., TensorTree]
    spec: pytree.PyTreeSpec
    arguments: pytree.PyTreeSpec
    rest: list[Any]
    places: list[int]
    paired: list[bool]
    """For each leaf of the solution, whether it is complex. Here it is its real and its imaginary part: the derivative
    of a function that has conjugates or absolute values in it, as every real loss's gradient, is not a complex matrix.
    """
    look: Look | None
    batch: tuple[int, ...]

    def given(self, tensors: Tensors) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of the optimality function after the solution."""
        leaves = list(self.rest)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        others, named = pytree.unflatten(self.arguments, leaves)
        return others, named

    def __call__(self, x: Tensors, tensors: Tensors) -> Tensors:
        x = _complex_again(x, self.paired)
        others, named = self.given(tensors)
        value = self.function(pytree.unflatten(self.spec, x), *others, **named)
        result = pytree.flatten_like(self.spec, value, "optimality_fn(solution, ...)", "solution")
        for got, leaf in zip(result, x, strict=True):
            if not isinstance(got, Tensor) or got.shape != leaf.shape:
                shape = tuple(got.shape) if isinstance(got, Tensor) else type(got).__name__
                raise ValueError(
                    f"`optimality_fn` must return the shapes of the solution: {tuple(leaf.shape)}, got {shape}"
                )
        wide = [got.to(leaf) if leaf.is_complex() else got for got, leaf in zip(result, x, strict=True)]
        return _real_pairs(wide)


class _Root(torch.autograd.Function):
    """The solution as a function of the equation's tensors."""

    apply: ClassVar[Any]
    generate_vmap_rule = True

    @staticmethod
    def forward(equation: _Equation, solver: Solver, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        # Samples may have one solution in common, but each has a gradient of its own.
        return tuple([vmap.for_each_sample(x).clone() for x in tensors[:count]])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.equation, ctx.solver, ctx.count = inputs[:3]
        ctx.save_for_backward(*output, *inputs[3 + ctx.count :])

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        """There is no forward-mode derivative."""
        refuse_forward_mode()

    @staticmethod
    @in_rows
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Solve ``(∂F/∂x)ᴴ u = x's gradient``; the gradient of ``θ`` is ``-(∂F/∂θ)ᴴ u``."""
        saved = list(ctx.saved_tensors)  # once: a checkpoint gives them up then
        equation, solver = ctx.equation, ctx.solver
        x, others = saved[: ctx.count], saved[ctx.count :]
        wanted = ctx.needs_input_grad[3 + ctx.count :]
        linearized = _linearized if may_be_differentiated() else _linearized_once
        with torch.autocast(grads[0].device.type, enabled=False):
            values, pulled, operator, params = linearized(equation, x, others, wanted)
            refuse_left_out(values)
            u, _ = solver.solve(operator, params, list(grads), equation.spec)
            found = pulled([-leaf for leaf in u])
        unused = [place for place, grad in enumerate(found) if wanted[place] and grad is None]
        if equation.look is not None:
            equation.look(Found(x, values, list(grads), u, equation.given(others)[0], unused))
        else:
            for place in unused:
                found[place] = torch.zeros_like(others[place], requires_grad=torch.is_grad_enabled())
        return (*([None] * (3 + ctx.count)), *found)


_Linearization: TypeAlias = tuple[
    Tensors, Callable[[Sequence[Tensor]], list[OptionalTensor]], LinearOperator, Tensors
]
"""The values of an equation, the gradients of its tensors, the transposed Jacobian and the parameters of that."""


def _linearized(equation: _Equation, x: Tensors, others: Tensors, wanted: Sequence[bool]) -> _Linearization:
    # What was saved may be wrapped by a `torch.func` transform that has ended; a view of it is not.
    x, others = [leaf.view_as(leaf) for leaf in x], [other.view_as(other) for other in others]
    values, pulled = vjp(functools.partial(equation, x), others, zeros=False, wanted=wanted)
    return values, pulled, TransposedJacobian(equation, len(x), equation.batch), [*x, *others]


def _linearized_once(
    equation: _Equation, x: Tensors, others: Tensors, wanted: Sequence[bool]
) -> _Linearization:
    """By a single evaluation of the function, whose graph serves all products."""
    with torch.enable_grad():
        point = [leaf.detach().requires_grad_() for leaf in x]
        given = [
            other.detach().requires_grad_(is_wanted) for other, is_wanted in zip(others, wanted, strict=True)
        ]
        values = equation(point, given)

    def pulled(cotangents: Sequence[Tensor]) -> list[OptionalTensor]:
        found = iter(pulled_back(values, cotangents, [one for one in given if one.requires_grad]))
        return [next(found) if one.requires_grad else None for one in given]

    return values, pulled, _Linearized(values, point, equation.batch), []


@dataclass(frozen=True)
class _Linearized(LinearOperator):
    """The transposed Jacobian of values that are there already."""

    values: Tensors
    point: Tensors
    batch: tuple[int, ...]

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return self.batch

    def apply(self, params: Tensors, vector: Tensors) -> Tensors:
        return pull(self.values, self.point, vector, True)

    def prepared(self, params: Tensors, like: Tensors) -> Product:
        return lambda vector: pull(self.values, self.point, vector, False)


def _positions(argnums: Any) -> list[int]:
    places = list(argnums) if isinstance(argnums, (tuple, list)) else [argnums]
    if not places or any(isinstance(n, bool) or not isinstance(n, int) for n in places):
        raise TypeError(f"`argnums` must be an integer or a sequence of them, got {argnums!r}")
    if min(places) < 1:
        raise ValueError(
            "`argnums` must be positions of at least 1, as the initial guess, 0, has no gradient and positions count "
            f"from the left; got {argnums}"
        )
    return places


def _bound(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Put keyword arguments in their positions, where they have any."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # a function written in C may have none
        return args, kwargs
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.args, bound.kwargs


def _cut(tree: Any, *, keep: bool = False) -> Any:
    """The tree with tensors detached from their history; with ``keep`` they require grad as before."""

    def cut(tensor: Tensor) -> Tensor:
        return vmap.leaf(tensor.detach()) if keep and tensor.requires_grad else tensor.detach()

    return pytree.map_tensors(cut, tree)


def _real_pairs(leaves: Sequence[Tensor]) -> Tensors:
    """Not as views, since a gradient of these may have a layout in which it cannot be seen as a complex tensor."""
    return [torch.stack((leaf.real, leaf.imag), dim=-1) if leaf.is_complex() else leaf for leaf in leaves]


def _complex_again(leaves: Sequence[Tensor], paired: Sequence[bool]) -> Tensors:
    return [
        torch.complex(leaf[..., 0], leaf[..., 1]) if is_paired else leaf
        for leaf, is_paired in zip(leaves, paired, strict=True)
    ]
