"""A function of a vector, perhaps with tensors inside → an operator, and these tensors as its parameters.

One product is traced, and the tensors that it takes from outside are replaced in later products, so that they are
arguments of the solve, however the function gets them. A function that differentiates a graph from outside cannot be
given other tensors: it is called as it is, and the parameters are the tensors at which a product's graph leaves off.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchopt_dist import pytree
from torchopt_dist.core.binding import bind
from torchopt_dist.core.bound import Bound
from torchopt_dist.core.graphs import Edge, edge_of, edges_behind, edges_of, leaf_of, leaves_behind
from torchopt_dist.core.substitution import Substitute, finding
from torchopt_dist.core.vjp import Tensors, has_derivative, pull, refuse_forward_mode, takes_duals
from torchopt_dist.linear_solve._operator import LinearOperator, Product
from torchopt_dist.torch_private import (
    engine_run,
    next_sequence_number,
    tensors_entering,
    transforms_are_active,
)

__all__ = ["FunctionOperator", "convert"]


def convert(
    matvec: Callable[[Any], Any], spec: pytree.PyTreeSpec, leaves: Tensors
) -> tuple[FunctionOperator, Tensors]:
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
    if takes_duals():
        refuse_forward_mode()
    function: Callable[..., Any] = matvec
    given: list[Any] = []
    given_spec: pytree.PyTreeSpec | None = None
    if isinstance(matvec, partial):
        arguments: Any = [matvec.args, matvec.keywords]
        given, given_spec = pytree.flatten(arguments)
        function = matvec.func
    bound = bind(function)
    operator = FunctionOperator(bound, spec, given_spec, tuple(given))
    explicit = list(filter(has_derivative, given))
    params, vector = explicit, leaves
    if not transforms_are_active():
        if not torch.is_grad_enabled():
            return operator, explicit
        params = [leaf.detach().requires_grad_(leaf.requires_grad) for leaf in explicit]
        vector = [leaf.detach() for leaf in leaves]
    trial = finding([*params, *vector], bound.tensors, "matvec")
    with trial:
        product = operator.call(params, vector)
    found, unseen = trial.used_by(product)
    if not (trial.follows_graph or unseen):
        return replace(operator, found=tuple(found)), explicit + found
    since = next_sequence_number()
    with tensors_entering() as entering:
        product = operator.call(explicit, vector)
    known = {edge_of(t): t for t in explicit + bound.tensors + trial.found if t.requires_grad}
    ends = _ends(product, since, known, entering)
    return replace(operator, explicit=tuple(explicit), ends=tuple(ends)), ends


def _check(product: Tensors, like: Tensors) -> None:
    for got, leaf in zip(product, like, strict=True):
        if not isinstance(got, Tensor):
            raise TypeError(f"`matvec` must return tensors, got {type(got).__name__}")
        if got.shape != leaf.shape:
            raise ValueError(
                "`matvec` must return the shapes that it takes: a leaf of "
                f"shape {tuple(leaf.shape)} became one of shape {tuple(got.shape)}"
            )


def _ends(product: Tensors, since: int, known: dict[Edge, Tensor], entering: dict[Edge, Tensor]) -> Tensors:
    """The tensors at which the graph of a product leaves its own nodes.

    Args:
        product: the product.
        since: the number of its first node.
        known: tensors that are certainly from outside.
        entering: tensors that enter the product's operations.

    Raises:
        ValueError: such a tensor is not a leaf, nor among those given.
    """
    ends = []
    for edge, is_end in edges_behind(edges_of(product), known, since):
        tensor = leaf_of(edge[0])
        if tensor is None and is_end:
            tensor = known.get(edge, entering.get(edge))
            if tensor is None:
                raise ValueError(
                    f"`matvec` depends on a result of {edge[0].name()} that is no argument of its operations, so the "
                    "solution would have no gradient for it: pass `functools.partial(matvec, tensor)` instead, and "
                    "compute with this tensor in it"
                )
        if tensor is not None:
            ends.append(tensor)
    return ends


@dataclass(frozen=True)
class FunctionOperator(LinearOperator):
    """A function of a tree; the parameters are tensors that a ``partial`` gives, and those that it takes from outside.

    If it follows a graph from outside, they are ``ends``, and it is called with its own tensors.
    """

    function: Bound
    spec: pytree.PyTreeSpec
    given_spec: pytree.PyTreeSpec | None
    given: tuple[Any, ...] = field(repr=False)
    found: tuple[Tensor, ...] = ()
    explicit: tuple[Tensor, ...] = ()
    ends: tuple[Tensor, ...] | None = None
    needs_graph: bool = field(default_factory=torch.is_grad_enabled)
    """Grad mode was on where the solver was called: a product may be a gradient of what it computes itself."""

    def call(self, explicit: Sequence[Tensor], vector: Tensors) -> Tensors:
        """Call the function."""
        args, kwargs = (), {}
        if self.given_spec is not None:
            values = iter(explicit)
            filled = [next(values) if has_derivative(leaf) else leaf for leaf in self.given]
            args, kwargs = pytree.unflatten(self.given_spec, filled)
        with torch.set_grad_enabled(self.needs_graph or torch.is_grad_enabled()):
            value = self.function(*args, pytree.unflatten(self.spec, vector), **kwargs)
        product = pytree.flatten_like(self.spec, value, "matvec(b)", "b")
        _check(product, vector)
        return product

    def apply(self, params: Tensors, vector: Tensors) -> Tensors:
        """Multiply, differentiably.

        Raises:
            ValueError: the product depends on another tensor than in the solver's call.
        """
        if self.ends is not None:
            points = [leaf.detach().requires_grad_() for leaf in vector]
            values = self._product(params, points)
            return _connected(values, [*points, *self.ends], [*vector, *params])
        product = self._product(params, vector)
        if self.needs_graph and not transforms_are_active():
            for leaf in leaves_behind(product, params + vector)[1]:
                raise ValueError(
                    "`matvec` must take the same tensors in each call, also in backward: it now takes one of shape "
                    f"{tuple(leaf.shape)} that it did not take in the solver's call. Pass "
                    "`functools.partial(matvec, tensor)` with what is changed or made anew"
                )
        return product

    def prepared(self, params: Tensors, like: Tensors) -> Product:
        """Fix the parameters."""
        return partial(self._product, params)

    def _product(self, params: Tensors, vector: Tensors) -> Tensors:
        if self.ends is not None:
            return self.call(self.explicit, vector)
        if not self.found:
            return self.call(params, vector)
        first = len(params) - len(self.found)
        with Substitute(self.found, params[first:]):
            return self.call(params[:first], vector)


def _connected(values: Tensors, ends: Tensors, tensors: Tensors) -> Tensors:
    """The values, connected to other tensors in the places of those at which their graph ends."""
    return list(_Connected.apply(values, ends, *tensors))


class _Connected(torch.autograd.Function):
    """Values whose graph ends at some tensors → the same, with other tensors in their places.

    The gradients are connected in the same way, so there are derivatives of every order.
    """

    apply: ClassVar[Any]

    @staticmethod
    def forward(ctx: Any, values: Tensors, ends: Tensors, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.values, ctx.ends = values, ends
        ctx.save_for_backward(*tensors)
        return tuple(value.detach() for value in values)

    @staticmethod
    def backward(ctx: Any, *bars: Tensor) -> tuple[Tensor | None, ...]:
        differentiable = torch.is_grad_enabled()
        weights = [bar.detach().requires_grad_(differentiable) for bar in bars]
        with torch.enable_grad(), _ending_at(ctx.ends, ctx.values) as values:
            grads = pull(values, ctx.ends, weights, differentiable)
        if differentiable:
            grads = _connected(grads, [*ctx.ends, *weights], [*ctx.saved_tensors, *bars])
        return (None, None, *grads)


@contextlib.contextmanager
def _ending_at(ends: Tensors, values: Tensors) -> Iterator[Tensors]:
    """The same values; a gradient of them does not go on beyond an end, to ends from which it was computed."""
    values = [value.view_as(value) if value.requires_grad else value for value in values]
    runs: set[int] = set()  # others may differentiate the graph beyond, in other threads

    def end(grads: tuple[Any, ...]) -> Any:
        return (None,) * len(grads) if engine_run() in runs else None

    nodes = {tensor.grad_fn for tensor in ends} - {None}
    hooks = [node.register_prehook(end) for node in nodes if node is not None]
    first = [value.grad_fn for value in values]
    hooks += [node.register_prehook(lambda _: runs.add(engine_run())) for node in first if node is not None]
    try:
        yield values
    finally:
        for hook in hooks:
            hook.remove()
