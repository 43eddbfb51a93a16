"""A function of tensors, tensors → its values, whose derivatives of every order compute the function again.

This is one node of the graph that keeps the function's arguments and nothing else. Its backward runs the function again
and differentiates it there. If that backward is recorded, it is such a node itself, with the arguments and the
gradients of the results as its arguments. So no graph of the function is ever kept, at any order; compare
``torch.utils.checkpoint``, whose backward records the function's graph, and keeps it, where it is recorded itself.

It is the rematerialization of Griewank, "Achieving logarithmic growth of temporal and spatial complexity in reverse
automatic differentiation", 1992, in its plainest form; what is computed again, and how much of it at a time, is up to
the caller: a step, a segment of steps, a block of a model, some rows of an attention.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor

from torchopt_dist.core.rows import in_rows
from torchopt_dist.core.second_order import guarded, nodes_of, refuse_left_out
from torchopt_dist.core.types import OptionalTensor
from torchopt_dist.core.vjp import has_derivative, pull
from torchopt_dist.formulas.normalization_nodes import is_mended, mend
from torchopt_dist.torch_private import apply_function, transforms_are_active

__all__ = ["Asked", "PureFn", "Segment", "apply", "is_node"]

PureFn: TypeAlias = Callable[..., Sequence[Tensor]]
"""Tensors → a tuple or a list of tensors, which depend on nothing else, but numbers: the same whenever it is called."""


class Asked(NamedTuple):
    """Gradients that a segment is asked for."""

    tensors: list[Tensor]
    """The arguments."""
    wanted: list[int]
    """The places of those whose gradients are asked for."""
    given: list[int]
    """The places of values whose gradients are given."""
    bars: Sequence[Tensor]
    """These."""
    recorded: bool
    """Whether the gradients that are returned may be differentiated themselves."""


class Segment(ABC):
    """A function of tensors that brings its own way to gradients of which there is no graph."""

    @abstractmethod
    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        """The values, with a graph that has derivatives of every order."""

    @abstractmethod
    def pull(self, asked: Asked) -> Sequence[OptionalTensor]:
        """The gradients of the arguments that are wanted."""


def apply(function: PureFn, *tensors: Tensor, values: Sequence[Tensor] | None = None) -> tuple[Tensor, ...]:
    """Call a function as one node of the graph, which computes it again for each derivative.

    Args:
        function: called with grad mode off for its values, and with grad mode on where it is differentiated. It must
            not change its arguments, and must not depend on other tensors that require grad: they get no gradient.
        tensors: its arguments, of any dtype. Those that require grad get gradients; one that is not used gets ``None``.
        values: its values at these arguments, if they are there already, without a graph; not inside of ``torch.func``.

    Returns:
        Its values, without its graph. Those of a floating-point or complex dtype require grad if an argument does.
    """
    made: tuple[Tensor, ...] = apply_function(_Remat, function, values, *tensors)
    return made


def is_node(node: Any) -> bool:
    """Whether a node of the graph is that of such a call."""
    return type(node).__name__ == f"{_Remat.__name__}Backward"


class _Remat(torch.autograd.Function):
    apply: ClassVar[Any]
    generate_vmap_rule = True

    @staticmethod
    def forward(function: PureFn, values: Sequence[Tensor] | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        if values is None:
            with torch.no_grad():
                values = function(*tensors)
        return tuple(value.detach() for value in values)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.function, _values, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.differentiable = [has_derivative(value) for value in output]
        ctx.mark_non_differentiable(*[value for value in output if not has_derivative(value)])
        ctx.set_materialize_grads(transforms_are_active())  # whose rules take no `None`

    @staticmethod
    @in_rows
    def backward(ctx: Any, *bars: OptionalTensor) -> tuple[OptionalTensor, ...]:
        tensors = ctx.saved_tensors  # once: a checkpoint gives them up then
        wanted = [
            place for place, x in enumerate(tensors) if ctx.needs_input_grad[place + 2] and has_derivative(x)
        ]
        given = [
            place
            for place, (bar, is_real) in enumerate(zip(bars, ctx.differentiable, strict=True))
            if is_real and bar is not None
        ]
        found: list[OptionalTensor] = [None] * (2 + len(tensors))
        if wanted and given:
            recorded = torch.is_grad_enabled() or transforms_are_active()
            pulled = _Pulled(ctx.function, len(tensors), wanted, given, recorded)
            arguments = [*tensors, *[bars[place] for place in given]]
            if recorded:
                made = apply(pulled, *arguments)
                grads: Sequence[OptionalTensor] = [
                    None if place in pulled.unused else grad for place, grad in zip(wanted, made, strict=True)
                ]
            else:
                grads = pulled.found(arguments)
            for place, grad in zip(wanted, grads, strict=True):
                found[place + 2] = grad
        return tuple(found)

    @staticmethod
    def jvp(ctx: Any, _function: None, _values: None, *dots: OptionalTensor) -> tuple[OptionalTensor, ...]:
        tensors = ctx.saved_tensors
        moving = {
            place: dot for place, dot in enumerate(dots) if dot is not None and has_derivative(tensors[place])
        }
        pushed = _Pushed(ctx.function, len(tensors), list(moving), ctx.differentiable)
        made = iter(apply(pushed, *tensors, *moving.values()))
        return tuple(next(made) if is_real else None for is_real in ctx.differentiable)


class _Pulled:
    """A function's arguments, the gradients of some of its values → the gradients of some of the arguments."""

    def __init__(
        self, function: PureFn, count: int, wanted: list[int], given: list[int], recorded: bool = True
    ) -> None:
        self.function, self.count, self.wanted, self.given = function, count, wanted, given
        self.recorded = recorded
        self.unused: set[int] = set()
        """Which arguments are not used, as far as that can be seen; a node has to give something for them."""

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        pairs = list(zip(self.wanted, self.found(tensors), strict=True))
        if not transforms_are_active():
            self.unused = {place for place, grad in pairs if grad is None}
        return [torch.zeros_like(tensors[place]) if grad is None else grad for place, grad in pairs]

    def found(self, tensors: Sequence[Tensor]) -> Sequence[OptionalTensor]:
        """The gradients; ``None`` for an argument that is not used, as far as that can be seen."""
        arguments, bars = list(tensors[: self.count]), tensors[self.count :]
        if isinstance(self.function, Segment) and not torch.is_grad_enabled():
            return self.function.pull(Asked(arguments, self.wanted, self.given, bars, self.recorded))
        if transforms_are_active():
            points = [arguments[place] for place in self.wanted]
            made: Any = torch.func.vjp(self._function_of(arguments), *points)
            _values, pulled = made
            grads: tuple[Tensor, ...] = pulled(tuple(bars))
            return grads
        is_recorded = torch.is_grad_enabled()
        with torch.enable_grad():
            if is_recorded:
                # Views, so that an argument that depends on another one is differentiated as if it did not.
                arguments = [x.view_as(x) if x.requires_grad else x for x in arguments]
            else:
                arguments = [x.detach() for x in arguments]
            for place in self.wanted:
                if not arguments[place].requires_grad:
                    arguments[place] = arguments[place].detach().requires_grad_()
            values = self.function(*arguments)
            points = [arguments[place] for place in self.wanted]
            pairs = [
                (values[place], bar)
                for place, bar in zip(self.given, bars, strict=True)
                if values[place].requires_grad
            ]
            if not pairs:
                return [None] * len(points)
            outputs, weights = zip(*pairs, strict=True)
            nodes = refuse_left_out(outputs, arguments)
            mends = is_recorded and any(is_mended(type(node).__name__) for node in nodes)
            if mends:  # torch takes means and variances for constants
                mend(nodes)
            grads = torch.autograd.grad(outputs, points, weights, create_graph=is_recorded, allow_unused=True)
            if mends:
                mend(nodes_of([grad for grad in grads if grad is not None], arguments))
            return guarded(grads, points, nodes) if is_recorded else grads

    def _function_of(self, arguments: list[Tensor]) -> Callable[..., tuple[Tensor, ...]]:
        def function(*points: Tensor) -> tuple[Tensor, ...]:
            filled = list(arguments)
            for place, point in zip(self.wanted, points, strict=True):
                filled[place] = point
            values = self.function(*filled)
            return tuple(values[place] for place in self.given)

        return function


class _Pushed(_Pulled):
    """A function's arguments, the tangents of some of them → the tangents of those values that have a derivative."""

    def __init__(self, function: PureFn, count: int, moved: list[int], differentiable: list[bool]) -> None:
        super().__init__(function, count, moved, [n for n, is_real in enumerate(differentiable) if is_real])

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        arguments, dots = list(tensors[: self.count]), tensors[self.count :]
        if transforms_are_active():
            points = tuple(arguments[place] for place in self.wanted)
            found: Any = torch.func.jvp(self._function_of(arguments), points, tuple(dots))
            _values, pushed = found
            return list(pushed)
        # A level of `torch.autograd.forward_ad` is open, and there cannot be another one within it. A gradient is
        # linear in the gradients of the values, and the transposed of this map takes tangents to tangents.
        is_recorded = torch.is_grad_enabled()
        with torch.enable_grad():
            if not is_recorded:
                arguments = [x.detach() for x in arguments]
            values = self._function_of(arguments)(*[arguments[place] for place in self.wanted])
            bars = [torch.zeros_like(value).requires_grad_() for value in values]
            grads = apply(_Pulled(self.function, self.count, self.wanted, self.given), *arguments, *bars)
            return pull(grads, bars, dots, is_recorded)
