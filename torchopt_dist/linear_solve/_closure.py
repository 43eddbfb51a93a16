"""A function of a vector, perhaps with tensors inside → an operator, and these tensors as its parameters.

One product is traced, and the tensors that it takes from outside are replaced in later products, so that they are
arguments of the solve, however the function gets them. A function that differentiates a graph from outside cannot be
given other tensors: it is called as it is, and the parameters are the tensors at which a product's graph leaves off.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchopt_dist import pytree
from torchopt_dist.core.binding import bind
from torchopt_dist.core.bound import Bound
from torchopt_dist.core.substitution import Edge, OnlyThese, StandIns, Substitute, Watch, edge_of
from torchopt_dist.core.vjp import Tensors, pull, refuse_forward_mode, takes_duals
from torchopt_dist.linear_solve._operator import LinearOperator, Product
from torchopt_dist.torch_private import (
    engine_run,
    forward_mode_is_active,
    next_sequence_number,
    sequence_numbers,
    tensors_entering,
    transforms_are_active,
)

__all__ = ["convert"]


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
    if isinstance(matvec, partial):
        arguments: Any = [matvec.args, matvec.keywords]
        given, given_spec = pytree.flatten(arguments)
        function = matvec.func
    bound = bind(function)
    tensors = bound.tensors
    fixed = _Function(bound, spec, given_spec, tuple(given))
    explicit = [leaf for leaf in given if _counts(leaf)]
    if transforms_are_active():
        seen = Watch(leaves + explicit, tensors)
        with seen:
            fixed.call(explicit, leaves)
        return _Substituting(fixed, tuple(seen.found)), explicit + seen.found
    if not torch.is_grad_enabled():
        return _Substituting(fixed, ()), explicit
    params = [leaf.detach().requires_grad_(leaf.requires_grad) for leaf in explicit]
    vector = [leaf.detach() for leaf in leaves]
    trial = StandIns(params + vector, tensors)
    with trial:
        product = fixed.call(params, vector)
    if not trial.follows_graph:
        reached = {id(leaf) for leaf in _leaves_of(product)}
        found = [
            tensor for tensor, leaf in zip(trial.found, trial.leaves, strict=True) if id(leaf) in reached
        ]
        if reached <= {id(leaf) for leaf in params + trial.leaves}:
            unused = [tensor for tensor in trial.found if all(tensor is not one for one in found)]
            return _Substituting(fixed, tuple(found), tuple(unused)), explicit + found
    since = next_sequence_number()
    with tensors_entering() as entering:
        product = fixed.call(explicit, vector)
    known = {edge_of(t): t for t in explicit + tensors + trial.found if t.requires_grad}
    hidden = _borders(product, since, known, entering)
    return _AsItIs(fixed, tuple(explicit), tuple(hidden)), hidden


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
    return edge_of(tensor)[0] if tensor.requires_grad else None


def _borders(
    outputs: Iterable[Tensor], since: int, known: dict[Edge, Tensor], entering: dict[Edge, Tensor]
) -> Tensors:
    """The tensors at which the graph of the outputs leaves the nodes of a product.

    Args:
        outputs: the product.
        since: the number of its first node.
        known: tensors that are certainly from outside.
        entering: tensors that enter the product's operations.

    Raises:
        ValueError: such a tensor is not a leaf, nor among those given.
    """
    found: dict[Edge, Tensor] = {}
    visited: set[Edge] = set()
    waiting = [edge_of(output) for output in outputs if output.requires_grad]
    while waiting:
        edge = waiting.pop()
        node = edge[0]
        if edge in visited or node is None:
            continue
        visited.add(edge)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            found[edge] = leaf
        elif edge in known or sequence_numbers(node)(node) < since:
            tensor = known.get(edge, entering.get(edge))
            if tensor is None:
                raise ValueError(
                    f"`matvec` depends on a result of {node.name()} that is no argument of its operations, so the "
                    "solution would have no gradient for it: pass `functools.partial(matvec, tensor)` instead, and "
                    "compute with this tensor in it"
                )
            found[edge] = tensor
        else:
            waiting += node.next_functions
    return list(found.values())


@dataclass(frozen=True)
class _Function:
    """A function of a tree → of lists: the tensors that a ``partial`` gives, and the vector's leaves."""

    function: Bound
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
class _AsItIs(LinearOperator):
    """A function that is called with its own tensors; the parameters are ``borders``."""

    fixed: _Function
    explicit: tuple[Tensor, ...]
    borders: tuple[Tensor, ...]

    def product(self, vector: Tensors) -> Tensors:
        return self.fixed.call(self.explicit, vector)

    def settle(self) -> None:
        self.fixed.function.settle()

    def apply(self, params: Tensors, vector: Tensors) -> Tensors:
        return list(_Closed.apply(self.product, self.borders, len(vector), *vector, *params))

    def prepared(self, params: Tensors, like: Tensors) -> Product:
        return self.product


class _Closed(torch.autograd.Function):
    """A function of tensors whose graph leaves off at other tensors, which are arguments here.

    Its backward is such a function, too, so there are derivatives of every order. The function itself must use the
    other tensors: the arguments only connect the graph.
    """

    apply: ClassVar[Any]

    @staticmethod
    def forward(
        ctx: Any, function: Product, borders: Tensors, count: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.function, ctx.borders, ctx.count = function, borders, count
        ctx.save_for_backward(*tensors)
        with torch.enable_grad():
            values = function([tensor.detach() for tensor in tensors[:count]])
        return tuple(value.detach() for value in values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: a checkpoint gives them up then
        given, stand_ins = saved[: ctx.count], saved[ctx.count :]
        pulled = partial(_pulled, ctx.function, ctx.borders, ctx.count)
        count = ctx.count + len(grads)
        return (None, None, None, *_Closed.apply(pulled, ctx.borders, count, *given, *grads, *stand_ins))


def _pulled(function: Product, borders: Tensors, count: int, tensors: Tensors) -> Tensors:
    """The gradients of a function whose graph leaves off at borders, with regard to its arguments and to these."""
    differentiable = any(tensor.requires_grad for tensor in tensors)
    points = [t.view_as(t) if t.requires_grad else t.detach().requires_grad_() for t in tensors[:count]]
    values = function(points)
    with _ending_at(borders, values) as values:
        return pull(values, [*points, *borders], tensors[count:], differentiable)


@contextlib.contextmanager
def _ending_at(borders: Tensors, values: Tensors) -> Iterator[Tensors]:
    """The same values; a gradient of them does not go on beyond a border, to borders from which it was computed."""
    values = [value.view_as(value) if value.requires_grad else value for value in values]
    runs: set[int] = set()  # others may differentiate the graph beyond, in other threads

    def end(grads: tuple[Any, ...]) -> Any:
        return (None,) * len(grads) if engine_run() in runs else None

    nodes = {border.grad_fn for border in borders} - {None}
    hooks = [node.register_prehook(end) for node in nodes if node is not None]
    first = [value.grad_fn for value in values]
    hooks += [node.register_prehook(lambda _: runs.add(engine_run())) for node in first if node is not None]
    try:
        yield values
    finally:
        for hook in hooks:
            hook.remove()


@dataclass(frozen=True)
class _Substituting(LinearOperator):
    fixed: _Function
    found: tuple[Tensor, ...]
    unused: tuple[Tensor, ...] = ()
    """Tensors that a product takes from outside, but does not depend on."""

    def settle(self) -> None:
        self.fixed.function.settle()

    def apply(self, params: Tensors, vector: Tensors) -> Tensors:
        if transforms_are_active():
            return self._product(Substitute, params, vector)
        return self._product(partial(OnlyThese, params + vector + [*self.unused]), params, vector)

    def prepared(self, params: Tensors, like: Tensors) -> Product:
        return partial(self._product, Substitute, params)

    def _product(self, kind: Callable[..., Substitute], params: Tensors, vector: Tensors) -> Tensors:
        first = len(params) - len(self.found)
        if not self.found:
            return self.fixed.call(params, vector)
        with kind(self.found, params[first:]):
            return self.fixed.call(params[:first], vector)
