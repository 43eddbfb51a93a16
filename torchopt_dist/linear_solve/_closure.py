"""A function of a vector, perhaps with tensors inside → an operator, and these tensors as its parameters.

Outside ``torch.func`` the parameters are the leaves of torch's graph on which a product depends, however the function
gets them. Inside a transform there is no such graph: there one product is traced, and the tensors that the function
takes from outside are replaced in later products. A function that applies a transform of its own to such a tensor must
be a ``functools.partial`` that gives the tensors as arguments.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import optree
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torchopt_dist import pytree
from torchopt_dist._functional import replaced
from torchopt_dist._torch_private import (
    entrances_for_tensors,
    forward_mode_is_active,
    is_functorch_tensor,
    tensor_at_level,
    transform_level,
    transforms_are_active,
)
from torchopt_dist.linear_solve._operator import LinearOperator, Product
from torchopt_dist.linear_solve._vjp import Tensors, pull, refuse_forward_mode, takes_duals

__all__ = ["Substitute", "convert"]


def convert(
    matvec: Callable[[Any], Any], spec: pytree.PyTreeSpec, leaves: Tensors
) -> tuple[LinearOperator, Tensors]:
    """Make an operator from a function, and find the tensors on which it depends.

    Args:
        matvec: tree → tree of the same structure and shapes, linear.
        spec: that structure.
        leaves: a vector's leaves, for one product.

    Raises:
        TypeError: ``matvec`` is not a function, or does not return tensors.
        ValueError: it returns a tree of another structure or of other shapes, or, inside a ``torch.func`` transform,
            applies one of its own to a tensor that is not among its arguments.
        NotImplementedError: a level of forward-mode differentiation is open.
    """
    if not callable(matvec):
        raise TypeError(f"`matvec` must be a function, got {type(matvec).__name__}")
    if forward_mode_is_active() and takes_duals():
        refuse_forward_mode()
    function: Callable[..., Any] = matvec
    given: list[Any] = []
    given_spec: pytree.PyTreeSpec | None = None
    if isinstance(matvec, functools.partial):
        arguments: Any = [matvec.args, matvec.keywords]
        given, given_spec = pytree.flatten(arguments)
        function = matvec.func
    fixed = _Function(function, spec, given_spec, tuple(given))
    explicit = [leaf for leaf in given if _counts(leaf)]
    if transforms_are_active():
        seen = _Watch(leaves + explicit, _closed_over(function))
        with seen:
            fixed.call(explicit, leaves)
        return _Substituting(fixed, tuple(seen.found)), explicit + seen.found
    if not torch.is_grad_enabled():
        return _Substituting(fixed, ()), explicit
    params = [leaf.detach().requires_grad_(leaf.requires_grad) for leaf in explicit]
    product = fixed.call(params, [leaf.detach() for leaf in leaves])
    hidden = _leaves_of(product)
    if all(any(leaf is param for param in params) for leaf in hidden):
        return _Substituting(fixed, ()), explicit
    hidden = _leaves_of(fixed.call(explicit, [leaf.detach() for leaf in leaves]))
    return _OfLeaves(fixed, tuple(explicit), tuple(hidden)), hidden


def _counts(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def _check(product: Tensors, like: Tensors) -> None:
    for got, leaf in zip(product, like, strict=True):
        if not isinstance(got, Tensor):
            raise TypeError(f"`matvec` must return tensors, got {type(got).__name__}")
        if got.shape != leaf.shape:
            raise ValueError(
                "`matvec` must return the shapes that it takes: a leaf of "
                f"shape {tuple(leaf.shape)} became one of shape {tuple(got.shape)}"
            )


def _leaves_of(outputs: Iterable[Tensor]) -> Tensors:
    """The leaves of the graph that require grad and that the outputs depend on."""
    found: dict[int, Tensor] = {}
    visited: set[Any] = set()
    waiting = [node for output in outputs if (node := _node(output)) is not None]
    while waiting:
        node = waiting.pop()
        if node in visited:
            continue
        visited.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            found[id(variable)] = variable
        waiting += [following for following, _ in node.next_functions if following is not None]
    return list(found.values())


def _node(tensor: Tensor) -> Any:
    return torch.autograd.graph.get_gradient_edge(tensor).node if tensor.requires_grad else None


@dataclass(frozen=True)
class _Function:
    """A function of a tree → of lists: the tensors that a ``partial`` gives, and the vector's leaves."""

    function: Callable[..., Any]
    spec: pytree.PyTreeSpec
    given_spec: pytree.PyTreeSpec | None
    given: tuple[Any, ...] = field(repr=False)
    needs_graph: bool = field(default_factory=torch.is_grad_enabled)
    """Grad mode was on where the solver was called: a product may be a gradient of what it computes itself."""

    def call(self, explicit: Sequence[Tensor], vector: Tensors) -> Tensors:
        args, kwargs = (), {}
        if self.given_spec is not None:
            values = iter(explicit)
            filled = [next(values) if _counts(leaf) else leaf for leaf in self.given]
            args, kwargs = pytree.unflatten(self.given_spec, filled)
        with torch.set_grad_enabled(self.needs_graph or torch.is_grad_enabled()):
            value = self.function(*args, pytree.unflatten(self.spec, vector), **kwargs)
        product = pytree.flatten_like(self.spec, value, "matvec(b)", "b")
        _check(product, vector)
        return product


@dataclass(frozen=True)
class _OfLeaves(LinearOperator):
    fixed: _Function
    explicit: tuple[Tensor, ...]
    leaves: tuple[Tensor, ...]

    def product(self, vector: Tensors) -> Tensors:
        return self.fixed.call(self.explicit, vector)

    def apply(self, params: Tensors, vector: Tensors) -> Tensors:
        return list(_Closed.apply(self.product, self.leaves, len(vector), *vector, *params))

    def prepared(self, params: Tensors, like: Tensors) -> Product:
        return self.product


class _Closed(torch.autograd.Function):
    """A function of tensors that closes over leaves of the graph, which are arguments here.

    Its backward is such a function, too, so there are derivatives of every order. The function itself must use the
    leaves: the arguments only connect the graph.
    """

    apply: ClassVar[Any]

    @staticmethod
    def forward(
        ctx: Any, function: Product, leaves: Tensors, count: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.function, ctx.leaves, ctx.count = function, leaves, count
        ctx.save_for_backward(*tensors)
        with torch.enable_grad():
            values = function([tensor.detach() for tensor in tensors[:count]])
        return tuple(value.detach() for value in values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: a checkpoint gives them up then
        given, stand_ins = saved[: ctx.count], saved[ctx.count :]
        pulled = functools.partial(_pulled, ctx.function, ctx.leaves, ctx.count)
        count = ctx.count + len(grads)
        return (None, None, None, *_Closed.apply(pulled, ctx.leaves, count, *given, *grads, *stand_ins))


def _pulled(function: Product, leaves: Tensors, count: int, tensors: Tensors) -> Tensors:
    """The gradients of a function that closes over leaves, with regard to its arguments and to the leaves."""
    differentiable = any(tensor.requires_grad for tensor in tensors)
    points = [t.view_as(t) if t.requires_grad else t.detach().requires_grad_() for t in tensors[:count]]
    return pull(function(points), [*points, *leaves], tensors[count:], differentiable)


@dataclass(frozen=True)
class _Substituting(LinearOperator):
    fixed: _Function
    found: tuple[Tensor, ...]

    def apply(self, params: Tensors, vector: Tensors) -> Tensors:
        first = len(params) - len(self.found)
        if not self.found:
            return self.fixed.call(params, vector)
        with Substitute(self.found, params[first:]):
            return self.fixed.call(params[:first], vector)


class _Watch(TorchFunctionMode):
    """Records the tensors of a transform that come from outside."""

    def __init__(self, known: Sequence[Tensor], closed_over: Sequence[Tensor]) -> None:
        super().__init__()
        self.closed_over = {id(tensor) for tensor in closed_over}
        self.level = transform_level()
        self.known = {id(tensor): tensor for tensor in known}
        self.found: Tensors = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _tensors((args, kwargs)):
            self._note(tensor)
        result = func(*args, **(kwargs or {}))
        self.known.update((id(tensor), tensor) for tensor in _tensors(result))
        return result

    def _note(self, tensor: Tensor) -> None:
        if id(tensor) in self.known:
            return
        inner = tensor_at_level(tensor, self.level)
        if inner is not tensor and id(inner) in self.closed_over - self.known.keys():
            raise ValueError(
                "inside a `torch.func` transform, `matvec` must not apply another one to a tensor that it closes "
                "over: pass `functools.partial(matvec, tensor)` instead"
            )
        if inner is tensor and (is_functorch_tensor(tensor) or tensor.requires_grad):
            self.found.append(tensor)
        self.known[id(tensor)] = tensor


_LEAVES = (bool, int, float, str, torch.dtype, torch.device)


class Substitute(TorchFunctionMode):
    """Replaces the tensors found by others, also in arguments of autograd functions and of what ``torch.func`` maps."""

    def __init__(self, found: Sequence[Tensor], others: Sequence[Tensor]) -> None:
        super().__init__()
        self.others = {id(old): new for old, new in zip(found, others, strict=True)}
        self.entrances = contextlib.ExitStack()

    def __enter__(self) -> Self:
        for module, name in entrances_for_tensors():
            self.entrances.enter_context(replaced(module, {name: self._enter}))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: object) -> None:
        self.entrances.close()
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    def _enter(self, torchs: Callable[..., Any], given: Any, *rest: Any) -> Any:
        if isinstance(given, tuple):  # what is deeper within has no gradient there
            return torchs(tuple(self.others.get(id(arg), arg) for arg in given), *rest)
        return torchs(self.others.get(id(given), given), *rest)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = [self._replaced(arg) for arg in args]
        if kwargs:
            return func(*args, **{name: self._replaced(arg) for name, arg in kwargs.items()})
        return func(*args)

    def _replaced(self, arg: Any) -> Any:
        if isinstance(arg, Tensor):
            return self.others.get(id(arg), arg)
        if arg is None or isinstance(arg, _LEAVES):
            return arg
        return pytree.tree_map(lambda leaf: self.others.get(id(leaf), leaf), arg)


def _closed_over(function: Any) -> Tensors:
    """The tensors in the cells of a function, and of the functions in its cells."""
    found: Tensors = []
    waiting, visited = [function], set()
    while waiting:
        one = waiting.pop()
        if id(one) in visited:
            continue
        visited.add(id(one))
        for cell in getattr(one, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # an empty cell
                found += _tensors(cell.cell_contents)
                waiting.append(cell.cell_contents)
    return found


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in optree.tree_leaves(tree) if isinstance(leaf, Tensor)]
