"""A step of an optimizer on lists of tensors → its results, recorded as one node of the graph for all tensors.

It is one node in eager mode, under ``torch.func.grad`` and ``vjp``, and in ``torch.func.vmap``, where a batch is more
elements to a kernel. In forward mode and under ``torch.compile`` the formula runs, operation by operation. A step has
one formula: its derivatives, to any order, are a kernel's or what autograd makes of the formula.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchopt_dist import torch_private
from torchopt_dist.core.types import OptionalTensor
from torchopt_dist.core.vjp import vjp
from torchopt_dist.ops import _dispatch as dispatch
from torchopt_dist.ops import _foreach as foreach
from torchopt_dist.ops._columns import (
    PLAIN,
    Columns,
    flatten,
    in_portions,
    join,
    narrowed,
    put,
    split,
    unflatten,
    widened,
)

__all__ = ["Step", "run"]


class Map(ABC):
    """Columns → columns, element by element: element i of a result needs element i of the tensors at the same index."""

    kernel_runs: bool
    """Whether the kernel is to be used, where it can be."""

    @property
    def is_one_node(self) -> bool:
        """Whether the whole map is one node of the graph; otherwise each operation of the formula is one."""
        return True

    @property
    def is_uniform(self) -> bool:
        """Whether all indices have the same hyper-parameters."""
        return True

    @abstractmethod
    def formula(self, columns: Columns, inplace: bool = False) -> list[list[Tensor]]:
        """The reference, by operations that can be differentiated; if ``inplace``, may overwrite the state."""

    @abstractmethod
    def kernel(self, columns: Columns) -> list[list[Tensor]]:
        """The results of the formula, by one call that records no graph."""


class Step(Map):
    """A map whose derivative may have a kernel, too."""

    @property
    def direct_factor(self) -> float | None:
        """The gradient of the last column as a multiple of the first result's, where no kernel computes it."""
        return None

    @abstractmethod
    def at(self, places: Sequence[int]) -> Step:
        """The same step, for the tensors at these places."""

    @abstractmethod
    def saved(self, columns: Columns) -> Columns:
        """The columns that the derivative depends on; ``None`` in the place of each other column."""

    @abstractmethod
    def backward_kernel(self, saved: Columns, grad_outputs: Columns) -> list[list[Tensor]]:
        """The gradients of the given columns, except one with a ``direct_factor``, by one call.

        Args:
            saved: the columns as :meth:`saved` gave them.
            grad_outputs: the gradients of the results: ``None`` for zeros, but not for all of them.
        """


class _Derivative(Map):
    """The saved columns of a step, the gradients of its results → the gradients of its columns."""

    def __init__(self, step: Step, there: Sequence[bool]) -> None:
        self.step, self.there, self.kernel_runs = step, there, step.kernel_runs

    @property
    def is_uniform(self) -> bool:
        return self.step.is_uniform

    def formula(self, columns: Columns, inplace: bool = False) -> list[list[Tensor]]:
        """Autograd of the step's formula, in float32 for half precision."""
        like = next(column for column in columns if column is not None)
        wide = [None if column is None else widened(column) for column in columns]
        saved, grad_outputs = wide[: len(self.there)], wide[len(self.there) :]
        given = [
            _zeros(wide) if there and column is None else column
            for there, column in zip(self.there, saved, strict=True)
        ]
        found = _pulled_through(self.step, given, grad_outputs)
        if self.step.direct_factor is not None:
            del found[-1]
        return [narrowed(column, like) for column in found]

    def kernel(self, columns: Columns) -> list[list[Tensor]]:
        return self.step.backward_kernel(columns[: len(self.there)], columns[len(self.there) :])


def run(map: Map, columns: Columns, inplace: bool = False) -> list[list[Tensor]]:
    """Apply a map in the fastest way; the graph of results that need one is recorded.

    Args:
        map: the map.
        columns: its input.
        inplace: if True, may overwrite the state, where nothing is recorded.
    """
    first = next(column for column in columns if column is not None)
    if not map.is_one_node or not first:
        return map.formula(columns, inplace)
    if foreach.runs_in_a_loop(first):
        return _as_node(map, columns) if dispatch.transforms_allow() else map.formula(columns, inplace)
    if torch.is_grad_enabled() and any(c is not None and any(x.requires_grad for x in c) for c in columns):
        return _as_node(map, columns) if isinstance(map, Step) else map.formula(columns)
    if map.kernel_runs:
        return map.kernel(columns)
    return map.formula(columns, inplace=True) if inplace else _in_portions(map, columns)


def _in_portions(map: Map, columns: Columns) -> list[list[Tensor]]:
    return in_portions(map.formula, columns) if map.is_uniform else map.formula(columns)


def _as_node(map: Map, columns: Columns) -> list[list[Tensor]]:
    there, tensors = flatten(columns)
    made = OptimizerStep.apply(map, there, *tensors)
    return split(made, len(made) * sum(there) // len(tensors))


class OptimizerStep(torch.autograd.Function):
    """The node of a step; a drawing of a graph shows the name of this class."""

    @classmethod
    def apply(cls, *args: Any) -> tuple[Tensor, ...]:
        """As torch's, which for a class with ``setup_context`` takes 50 µs to look at ``forward``'s signature."""
        made: tuple[Tensor, ...] = torch_private.apply_function(cls, *args)
        return made

    @staticmethod
    def forward(map: Map, there: tuple[bool, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        columns = unflatten(tensors, there)
        made = map.kernel(columns) if map.kernel_runs else _in_portions(map, columns)
        return tuple(join(made))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        map, there, *tensors = inputs
        columns = unflatten(tensors, there)
        ctx.map, ctx.there, ctx.length = map, there, len(tensors) // sum(there)
        ctx.saved_there, saved = flatten(map.saved(columns) if isinstance(map, Step) else columns)
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *output_grads: OptionalTensor) -> tuple[OptionalTensor, ...]:
        map, length = ctx.map, ctx.length
        grad_outputs = split(output_grads, len(output_grads) // length)
        saved = unflatten(ctx.saved_tensors, ctx.saved_there)
        if not isinstance(map, Step):
            return None, None, *join(_pulled_through(map, saved, _with_zeros(grad_outputs)))
        if any(all(x is not None for x in column) for column in grad_outputs):
            return None, None, *join(_gradients(map, saved, ctx.there, grad_outputs))
        places = [
            p for p, row in enumerate(zip(*grad_outputs, strict=True)) if any(x is not None for x in row)
        ]
        if not places:
            return None, None, *[None] * (sum(ctx.there) * length)
        saved = [column and [column[place] for place in places] for column in saved]
        grad_outputs = [[column[place] for place in places] for column in grad_outputs]
        found = _gradients(map.at(places), saved, ctx.there, grad_outputs)
        return None, None, *join(put([None] * length, places, column) for column in found)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], map: Map, there: tuple[bool, ...], *tensors: Tensor
    ) -> tuple[Any, Any]:
        length = len(tensors) // sum(there)
        dims = in_dims[2:]
        batched = [any(dim is not None for dim in dims[place::length]) for place in range(length)]

        def with_batch_first(x: Tensor, dim: int | None, place: int) -> Tensor:
            if dim is not None:
                return x.movedim(dim, 0)
            return x.expand(info.batch_size, *x.shape) if batched[place] else x

        tensors = tuple(
            with_batch_first(x, dim, i % length) for i, (x, dim) in enumerate(zip(tensors, dims, strict=True))
        )
        made = OptimizerStep.apply(map, there, *tensors)
        return made, tuple(0 if batched[i % length] else None for i in range(len(made)))


def _gradients(
    step: Step, saved: Columns, there: Sequence[bool], grad_outputs: Sequence[Sequence[OptionalTensor]]
) -> list[Sequence[OptionalTensor]]:
    """The gradients of the given columns; at each index one of the results has a gradient."""
    columns = [*saved, *_with_zeros(grad_outputs)]
    derivative = _Derivative(step, there)
    if not torch_private.transforms_are_active() and any(map(foreach.are_batched, grad_outputs)):
        with foreach.in_loops():
            found = derivative.formula(columns)
    else:
        found = run(derivative, columns)
    factor = step.direct_factor
    if factor is None:
        return list(found)
    direct = [x if x is None or factor == 1 else x * factor for x in grad_outputs[0]]
    return [*found, direct]


def _with_zeros(columns: Sequence[Sequence[OptionalTensor]]) -> list[list[Tensor] | None]:
    """The columns with zeros in the place of ``None``; ``None`` for a column that has only ``None``."""
    models = [next((x for x in row if x is not None), None) for row in zip(*columns, strict=True)]

    def filled(column: Sequence[OptionalTensor]) -> list[Tensor]:
        pairs = zip(column, models, strict=True)
        return [torch.zeros_like(model) if x is None else x for x, model in pairs if model is not None]

    return [None if all(x is None for x in column) else filled(column) for column in columns]


def _zeros(columns: Columns) -> list[Tensor]:
    """Zeros of the shapes of the first given column."""
    like = next(column for column in columns if column is not None)
    return [
        torch.zeros(x.shape, dtype=x.dtype, device=x.device) if type(x) in PLAIN else torch.zeros_like(x)
        for x in like
    ]


def _pulled_through(map: Map, columns: Columns, grad_outputs: Columns) -> list[list[Tensor]]:
    """The gradients of the given columns, by autograd of a map's formula; they are differentiable."""
    there, tensors = flatten(columns)
    used = [k for k, column in enumerate(grad_outputs) if column is not None]
    into = join(grad_outputs[k] or [] for k in used)

    def formula(tensors: list[Tensor]) -> list[Tensor]:
        made = map.formula(unflatten(tensors, there))
        return join(made[k] for k in used)

    _results, pull = vjp(formula, tensors, once=True)
    return split(pull(into), sum(there))
