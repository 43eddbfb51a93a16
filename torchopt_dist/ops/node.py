"""A map of lists, with its formula and its kernel → its results, recorded as one node of the graph for all tensors.

It is one in eager mode, under ``torch.func.grad`` and ``vjp``, and in ``torch.func.vmap``, where a batch is more
elements to a kernel. In forward mode and under ``torch.compile`` the formula runs, operation by operation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchopt_dist.ops import dispatch, foreach
from torchopt_dist.ops.columns import Columns, flatten, in_portions, join, put, split, unflatten
from torchopt_dist.typing import OptionalTensor

__all__ = ["Map", "Step", "run"]


class Map(ABC):
    """Columns → columns, element by element: element i of a result needs element i of the tensors at its place."""

    kernel_runs: bool
    """Whether the kernel is to be used, where it can be."""

    @property
    def recorded(self) -> bool:
        """Whether the whole is one node; else each operation of the formula is one."""
        return True

    @property
    def uniform(self) -> bool:
        """Whether one set of numbers goes for all places."""
        return True

    @abstractmethod
    def formula(self, columns: Columns, inplace: bool = False) -> list[list[Tensor]]:
        """The reference, by operations that can be differentiated; ``inplace`` is leave to overwrite the state."""

    @abstractmethod
    def kernel(self, columns: Columns) -> list[list[Tensor]]:
        """The same, by one call that records no graph."""


class Step(Map):
    """A map whose derivative has a kernel, too."""

    @abstractmethod
    def at(self, places: Sequence[int]) -> Step:
        """The same, for the tensors at these places."""

    @abstractmethod
    def saved(self, given: Columns, made: Columns) -> Columns:
        """What the derivative needs, of what came in and of what came out."""

    @abstractmethod
    def backward_formula(self, columns: Columns) -> list[list[Tensor]]:
        """What flows out to the columns that came in.

        Args:
            columns: what was saved, and what flows into each of the results: ``None`` for zeros, but not in all.
        """

    @abstractmethod
    def backward_kernel(self, columns: Columns) -> list[list[Tensor]]:
        """The same, by one call."""

    def rest(self, flows: Sequence[Sequence[OptionalTensor]]) -> list[list[OptionalTensor]]:
        """What flows out to the columns after those, straight from what flows into the results."""
        return []


class _Derivative(Map):
    """A step's saved columns and what flows into its results → what flows out to what came in."""

    def __init__(self, step: Step) -> None:
        self.step, self.kernel_runs = step, step.kernel_runs

    @property
    def uniform(self) -> bool:
        return self.step.uniform

    def formula(self, columns: Columns, inplace: bool = False) -> list[list[Tensor]]:
        return self.step.backward_formula(columns)

    def kernel(self, columns: Columns) -> list[list[Tensor]]:
        return self.step.backward_kernel(columns)


def run(map: Map, columns: Columns, inplace: bool = False) -> list[list[Tensor]]:
    """Apply a map in the fastest way that records what is to be recorded.

    Args:
        map: the map.
        columns: what it is applied to.
        inplace: leave to overwrite the state, where nothing is recorded.
    """
    first = next(column for column in columns if column is not None)
    if not map.recorded or not first:
        return map.formula(columns, inplace)
    if foreach.runs_in_a_loop(first):
        return _as_node(map, columns) if dispatch.transforms_allow() else map.formula(columns, inplace)
    if torch.is_grad_enabled() and any(c is not None and any(x.requires_grad for x in c) for c in columns):
        return _as_node(map, columns) if isinstance(map, Step) else map.formula(columns)
    if map.kernel_runs:
        return map.kernel(columns)
    return map.formula(columns, inplace=True) if inplace else _in_portions(map, columns)


def _in_portions(map: Map, columns: Columns) -> list[list[Tensor]]:
    return in_portions(map.formula, columns) if map.uniform else map.formula(columns)


def _as_node(map: Map, columns: Columns) -> list[list[Tensor]]:
    there, tensors = flatten(columns)
    made = OptimizerStep.apply(map, there, *tensors)
    return split(made, len(made) * sum(there) // len(tensors))


class OptimizerStep(torch.autograd.Function):
    """The node. Its name is what a drawing of a graph shows."""

    @classmethod
    def apply(cls, *args: Any) -> tuple[Tensor, ...]:
        """As torch's, which for a class with ``setup_context`` takes 50 µs to look at ``forward``'s signature."""
        if _SHORTCUT and not torch._C._are_functorch_transforms_active():
            args = torch._functorch.utils.unwrap_dead_wrappers(args)
            return super(torch.autograd.Function, cls).apply(*args)  # type: ignore[misc]
        return super().apply(*args)  # type: ignore[no-untyped-call]

    @staticmethod
    def forward(map: Map, there: tuple[bool, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        columns = unflatten(tensors, there)
        made = map.kernel(columns) if map.kernel_runs else _in_portions(map, columns)
        return tuple(join(made))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        map, there, *tensors = inputs
        given = unflatten(tensors, there)
        ctx.map, ctx.there, ctx.length = map, there, len(tensors) // sum(there)
        made = split(output, len(output) // ctx.length)
        ctx.saved_there, saved = flatten(map.saved(given, made) if isinstance(map, Step) else given)
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *output_grads: OptionalTensor) -> tuple[OptionalTensor, ...]:
        map, length = ctx.map, ctx.length
        flows = split(output_grads, len(output_grads) // length)
        saved = unflatten(ctx.saved_tensors, ctx.saved_there)
        if not isinstance(map, Step):
            return None, None, *_pulled_back(map, saved, ctx.there, flows)
        if any(all(x is not None for x in column) for column in flows):
            return None, None, *join(_flow_back(map, saved, flows))
        places = [p for p, flow in enumerate(zip(*flows, strict=True)) if any(x is not None for x in flow)]
        if not places:
            return None, None, *[None] * (sum(ctx.there) * length)
        saved = [column and [column[place] for place in places] for column in saved]
        flows = [[column[place] for place in places] for column in flows]
        found = _flow_back(map.at(places), saved, flows)
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


_SHORTCUT = hasattr(torch._C, "_are_functorch_transforms_active") and hasattr(
    torch._functorch.utils, "unwrap_dead_wrappers"
)


def _flow_back(
    step: Step, saved: Columns, flows: Sequence[Sequence[OptionalTensor]]
) -> list[Sequence[OptionalTensor]]:
    """What flows out to each column that came in; at each place something flows into one of the results."""
    columns = [*saved, *(_filled(flow, flows) for flow in flows)]
    if not torch._C._are_functorch_transforms_active() and any(map(foreach.are_batched, flows)):
        with foreach.in_loops():
            found = step.backward_formula(columns)
    else:
        found = run(_Derivative(step), columns)
    return [*found, *step.rest(flows)]


def _filled(
    column: Sequence[OptionalTensor], columns: Sequence[Sequence[OptionalTensor]]
) -> list[Tensor] | None:
    """Zeros in the places that are ``None``, like another column's tensor there; ``None`` if all are."""
    present = [x for x in column if x is not None]
    if len(present) == len(column):
        return present
    if not present:
        return None
    models = (next(x for x in row if x is not None) for row in zip(*columns, strict=True))
    return [torch.zeros_like(like) if x is None else x for x, like in zip(column, models, strict=True)]


def _pulled_back(
    map: Map, columns: Columns, there: tuple[bool, ...], flows: Sequence[Sequence[OptionalTensor]]
) -> tuple[Tensor, ...]:
    """What flows out of a map that has a formula, but no derivative of its own."""

    def flat(*tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(join(map.formula(unflatten(tensors, there))))

    made, pull, *_ = torch.func.vjp(flat, *flatten(columns)[1])
    into = join(flows)
    grads = pull(tuple(torch.zeros_like(y) if x is None else x for x, y in zip(into, made, strict=True)))
    return tuple(grads)
