"""Gradients of the results of an optimizer's step → gradients of its inputs, by the derivative of the step.

There is no graph, and the step is not made again: where its derivative is a kernel, that is one pass over the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchopt_dist import pytree
from torchopt_dist._types import OptionalTensor, OptState
from torchopt_dist.ops._columns import pick, present, put
from torchopt_dist.transform._step_options import StepOptions

__all__ = ["PulledStep", "Room", "StepBars", "StepDerivative", "leaves_of"]


class StepBars(NamedTuple):
    """Gradients of what a step makes, or of what it is made of; ``None`` for zero."""

    params: Sequence[OptionalTensor]
    """One a leaf of the parameters."""
    state: Sequence[OptionalTensor]
    """One a leaf of the state, in the order in which it is flattened."""


class PulledStep(NamedTuple):
    """Gradients of what a step is made of."""

    before: StepBars
    """Of the parameters and the state."""
    grads: Sequence[OptionalTensor]
    """Of the gradients, one for each leaf of the parameters."""
    lr: Tensor | None
    """The learning rate, 0-d, if it has a graph."""
    of_lr: OptionalTensor = None
    """Its gradient, where the step was gone back through in place, and then only; 0 if it has no graph."""


class Room(NamedTuple):
    """Memory that is to be overwritten, beside the gradients of a step's results: tensors like the parameters."""

    grads: Sequence[OptionalTensor]
    """By the gradients of the gradients."""
    terms: Sequence[OptionalTensor]
    """By whatever the gradient of the learning rate is computed from."""


def leaves_of(field: Any) -> list[Any]:
    """The leaves of a field. Most fields are lists of tensors: the check takes a tenth of the time of flattening."""
    return field if type(field) is list and {*map(type, field)} == {Tensor} else pytree.flatten(field)[0]


@dataclass(frozen=True, slots=True)
class StepDerivative:
    """Gradients of the results of a step → of what it was made of; or ``None``: the step is to be recorded.

    That is where tensors are complex or sparse, or a count of steps has a gradient.
    """

    op: Callable[..., tuple[list[Any], ...]]
    op_in_place: Callable[..., OptionalTensor] | None
    """The same over the memory of the gradients of the results, if there is such an op."""
    state_types: tuple[type[Any], ...]
    options: StepOptions

    def __call__(
        self,
        params: Sequence[Any],
        grads: Sequence[Any],
        state: OptState,
        bars: StepBars,
        room: Room | None = None,
        /,
    ) -> PulledStep | None:
        """Go back through one step.

        Args:
            params: the leaves of the parameters.
            grads: as many gradients; one that is ``None`` leaves its parameter and its state alone.
            state: the states of the links that the step stands for.
            bars: the gradients of its results.
            room: if given, it and the memory of ``bars`` may be overwritten: the results are there, if there is
                ``of_lr``.
        """
        fields: dict[str, list[Any]] = {}
        starts: dict[str, int] = {}
        start = 0
        for own in state:
            for name, field in zip(own._fields, own, strict=True):
                leaves = leaves_of(field)
                if isinstance(own, self.state_types) and leaves:
                    starts[name], fields[name] = start, leaves
                start += len(leaves)
        counted = fields.pop("step", None)
        counts = {} if counted is None else {"step": counted}
        of = {name: bars.state[starts[name] : starts[name] + len(params)] for name in fields}
        known = {starts[name] + place for name in fields for place in range(len(params))}
        there = [x for x in (*params, *grads) if x is not None]
        if any(bar is not None and place not in known for place, bar in enumerate(bars.state)) or any(
            x.is_complex() or x.layout != torch.strided for x in there
        ):
            return None
        with torch.enable_grad():
            rate = self.options.rate(state)
        lr, options = rate.value, self.options.with_rate(rate)
        places = [
            place
            for place in present(grads)
            if any(x[place] is not None for x in (bars.params, *of.values()))
        ]
        to_grads: Sequence[OptionalTensor] = [None] * len(params)
        to_params, to_state = bars.params, list(bars.state)
        with_graph = lr if isinstance(lr, Tensor) and lr.requires_grad else None
        named = {f"{name}s": pick(field, places) for name, field in (fields | counts).items()}
        if room is not None and self.op_in_place is not None and places:
            columns = [
                [torch.zeros_like(params[p]) if column[p] is None else column[p] for p in places]
                for column in (bars.params, *of.values())
            ]
            of_lr = self.op_in_place(
                *columns,
                to_grads=pick(room.grads, places),
                terms=None if with_graph is None else pick(room.terms, places),
                grads=pick(grads, places),
                params=pick(params, places),
                **named,
                **options,
            )
            if of_lr is not None:
                for name, column in zip(fields, columns[1:], strict=True):
                    for place, bar in zip(places, column, strict=True):
                        to_state[starts[name] + place] = bar
                before = StepBars(put(to_params, places, columns[0]), to_state)
                return PulledStep(before, put(to_grads, places, pick(room.grads, places)), with_graph, of_lr)
        if places:
            found, *of_fields, moved = self.op(
                pick(grads, places),
                params=pick(params, places),
                **named,
                **options,
                bars=[[column[place] for place in places] for column in (bars.params, *of.values())],
            )
            to_grads, to_params = put(to_grads, places, found), put(to_params, places, moved)
            for name, new in zip(fields, of_fields, strict=True):
                for place, bar in zip(places, new, strict=True):
                    to_state[starts[name] + place] = bar
        return PulledStep(StepBars(to_params, to_state), to_grads, with_graph)
