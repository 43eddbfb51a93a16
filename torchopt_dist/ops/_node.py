"""A step of an optimizer on lists of tensors → its results, recorded as one node of the graph for all tensors.

It is one node in eager mode, under ``torch.func.grad`` and ``vjp``, and in ``torch.func.vmap``, where a batch is more
elements to a kernel. In forward mode and under ``torch.compile`` the formula runs, operation by operation. A step has
one formula: its derivatives, to any order, are a kernel's or what autograd makes of the formula.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchopt_dist import torch_private
from torchopt_dist.core.types import OptionalTensor
from torchopt_dist.core.vjp import vjp
from torchopt_dist.ops import _foreach as foreach
from torchopt_dist.ops import library
from torchopt_dist.ops._columns import (
    PLAIN,
    Columns,
    flatten,
    join,
    narrowed,
    portions,
    put,
    split,
    unflatten,
    widened,
)

__all__ = ["Step", "run"]

_SMALL = 8192
"""Elements a tensor up to which the time of an operation is that of the call."""


class Step(ABC):
    """Columns → columns, element by element: element i of a result needs element i of the tensors at the same index."""

    kernel_runs: bool
    """Whether the kernel is to be used, where it can be."""
    is_derivative: ClassVar[bool] = False
    """Whether it is the derivative of another step, and has none by a kernel itself."""

    @property
    def is_one_node(self) -> bool:
        """Whether the whole step is one node of the graph; otherwise each operation of the formula is one."""
        return True

    @property
    def is_uniform(self) -> bool:
        """Whether all indices have the same hyper-parameters."""
        return True

    @property
    def direct_factor(self) -> float | None:
        """The gradient of the last column as a multiple of the first result's, where no kernel computes it."""
        return None

    @abstractmethod
    def formula(self, columns: Columns, inplace: bool = False) -> list[list[Tensor]]:
        """The reference, by operations that can be differentiated; if ``inplace``, may overwrite the state."""

    @abstractmethod
    def kernel(self, columns: Columns) -> list[list[Tensor]]:
        """The results of the formula, by one call that records no graph."""

    def at(self, places: Sequence[int]) -> Step:
        """The same step, for the tensors at these places."""
        return self

    def saved(self, columns: Columns) -> Columns:
        """The columns that the derivative depends on; ``None`` in the place of each other column."""
        return columns

    def backward_kernel(self, saved: Columns, grad_outputs: Columns) -> list[list[Tensor]]:
        """The gradients of the given columns, except one with a ``direct_factor``, by one call.

        Args:
            saved: the columns as :meth:`saved` gave them.
            grad_outputs: the gradients of the results: ``None`` for zeros, but not for all of them.
        """
        raise NotImplementedError


class _Derivative(Step):
    """The saved columns of a step, the gradients of its results → the gradients of its columns."""

    is_derivative = True

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


def run(step: Step, columns: Columns, inplace: bool = False) -> list[list[Tensor]]:
    """Apply a step in the fastest way; the graph of results that need one is recorded.

    Args:
        step: the step.
        columns: its input.
        inplace: if True, may overwrite the state, where nothing is recorded.
    """
    first = next(column for column in columns if column is not None)
    if not step.is_one_node or not first:
        return step.formula(columns, inplace)
    if foreach.runs_in_a_loop(first):
        return _as_node(step, columns) if library.transforms_allow() else step.formula(columns, inplace)
    if torch.is_grad_enabled() and any(c is not None and any(x.requires_grad for x in c) for c in columns):
        return step.formula(columns) if step.is_derivative else _as_node(step, columns)
    if step.kernel_runs:
        return step.kernel(columns)
    return step.formula(columns, inplace=True) if inplace else _in_portions(step, columns)


def _in_portions(step: Step, columns: Columns) -> list[list[Tensor]]:
    """The formula's results, where that is fastest: of many small tensors as one, of a few at a time.

    Small tensors have the strides of those of the last column, and separate storages.
    """
    if not step.is_uniform:
        return step.formula(columns)
    first = columns[0] or []
    out: list[list[Tensor]] = []
    for part in portions(first):
        share = [column if column is None else column[part] for column in columns]
        small = _flat_sizes([column for column in share if column is not None])
        if small is None:
            found = step.formula(share)
        else:
            flat = [None if c is None else [torch.cat([x.reshape(-1) for x in c])] for c in share]
            like = [column for column in share if column is not None][-1]
            found = [_cut(column[0], small, like) for column in step.formula(flat)]
        out = [[*before, *new] for before, new in zip(out, found, strict=True)] if out else list(found)
    return out


def _cut(flat: Tensor, sizes: list[int], like: Sequence[Tensor]) -> list[Tensor]:
    """Pieces of these sizes, copied to tensors that are laid out as others."""
    pieces = [torch.empty_like(x, dtype=flat.dtype) for x in like]
    torch._foreach_copy_(pieces, [cut.view_as(x) for cut, x in zip(flat.split(sizes), like, strict=True)])
    return pieces


def _flat_sizes(columns: Sequence[list[Tensor]]) -> list[int] | None:
    """The lengths of small tensors that may be laid end to end; ``None`` if these may not."""
    first = columns[0]
    sizes = [x.numel() for x in first]
    if len(first) < 2 or sum(sizes) > _SMALL * len(sizes):
        return None
    if (
        not {type(x) for column in columns for x in column} <= PLAIN
    ):  # DTensors, which lie on several processes
        return None
    kinds = {(x.dtype, x.device) for column in columns for x in column}
    return sizes if len(kinds) == 1 else None


def _as_node(step: Step, columns: Columns) -> list[list[Tensor]]:
    there, tensors = flatten(columns)
    made = OptimizerStep.apply(step, there, *tensors)
    return split(made, len(made) * sum(there) // len(tensors))


class OptimizerStep(torch.autograd.Function):
    """The node of a step; a drawing of a graph shows the name of this class."""

    @classmethod
    def apply(cls, *args: Any) -> tuple[Tensor, ...]:
        """As torch's, which for a class with ``setup_context`` takes 50 µs to look at ``forward``'s signature."""
        made: tuple[Tensor, ...] = torch_private.apply_function(cls, *args)
        return made

    @staticmethod
    def forward(step: Step, there: tuple[bool, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        columns = unflatten(tensors, there)
        made = step.kernel(columns) if step.kernel_runs else _in_portions(step, columns)
        return tuple(join(made))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        step, there, *tensors = inputs
        columns = unflatten(tensors, there)
        ctx.step, ctx.there, ctx.length = step, there, len(tensors) // sum(there)
        ctx.saved_there, saved = flatten(step.saved(columns))
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *output_grads: OptionalTensor) -> tuple[OptionalTensor, ...]:
        step, length = ctx.step, ctx.length
        grad_outputs = split(output_grads, len(output_grads) // length)
        saved = unflatten(ctx.saved_tensors, ctx.saved_there)
        if step.is_derivative:
            return None, None, *join(_pulled_through(step, saved, _with_zeros(grad_outputs)))
        if any(all(x is not None for x in column) for column in grad_outputs):
            return None, None, *join(_gradients(step, saved, ctx.there, grad_outputs))
        places = [
            p for p, row in enumerate(zip(*grad_outputs, strict=True)) if any(x is not None for x in row)
        ]
        if not places:
            return None, None, *[None] * (sum(ctx.there) * length)
        saved = [column and [column[place] for place in places] for column in saved]
        grad_outputs = [[column[place] for place in places] for column in grad_outputs]
        found = _gradients(step.at(places), saved, ctx.there, grad_outputs)
        return None, None, *join(put([None] * length, places, column) for column in found)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], step: Step, there: tuple[bool, ...], *tensors: Tensor
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
        made = OptimizerStep.apply(step, there, *tensors)
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


def _pulled_through(step: Step, columns: Columns, grad_outputs: Columns) -> list[list[Tensor]]:
    """The gradients of the given columns, by autograd of a step's formula; they are differentiable."""
    there, tensors = flatten(columns)
    used = [k for k, column in enumerate(grad_outputs) if column is not None]
    into = join(grad_outputs[k] or [] for k in used)

    def formula(tensors: list[Tensor]) -> list[Tensor]:
        made = step.formula(unflatten(tensors, there))
        return join(made[k] for k in used)

    _results, pull = vjp(formula, tensors, once=True)
    return split(pull(into), sum(there))
