"""The two nodes of a call in the caller's autograd graph: inputs → anchor, and anchor, outputs → results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from torchopt_dist.core.inputs import Seen, hold_grad_accumulators
from torchopt_dist.distributed.group.group import errors_of_runs
from torchopt_dist.torch_private import (
    engine_needs_node,
    engine_run,
    held_by_run,
    set_sequence_number,
)

__all__ = ["FIRST", "Graph", "collect", "dispatch", "errors_of_nodes"]

FIRST = 2**62
"""Sequence number of *collect*: of the nodes that are ready, the autograd engine runs the one with the highest."""


@contextmanager
def errors_of_nodes(roots: Sequence[Tensor]) -> Iterator[list[BaseException]]:
    """A context with the errors that nodes of calls raise in a backward pass that begins with these tensors.

    The engine of ``torch.distributed.autograd``, which uses a thread of its own, raises an error with the text alone.
    """
    found: list[BaseException] = []
    runs: set[int] = set()
    errors = errors_of_runs()

    def begins(_: Tensor) -> None:
        runs.add(engine_run())
        errors.update(dict.fromkeys(runs, found))

    hooks = [root.register_hook(begins) for root in roots]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
        for run in runs:
            errors.pop(run, None)


class Graph(Protocol):
    """The part of a call between its two nodes.

    ``number`` is the sequence number of *dispatch*: low, since it waits for a worker. Each share of a call has another
    one, since the gradients of an input are added up in this order. Among equal ones the engine's order is that of a
    heap, which every other node changes. ``inputs`` are those of *dispatch*, set by it.
    """

    number: int
    inputs: Seen

    def start_backward(
        self, output_grads: tuple[Tensor | None, ...], wanted: tuple[bool, ...]
    ) -> Callable[[], list[Tensor | None]]:
        """Send the gradients of the results; returns a function that waits for those of the inputs."""


def dispatch(graph: Graph, inputs: list[Tensor]) -> Tensor:
    """The node next to the inputs; returns the anchor."""
    with torch.enable_grad():
        apply: Callable[..., Tensor] = _Dispatch.apply
        held = hold_grad_accumulators(inputs)
        anchor = apply(graph, *inputs)
        held.clear()  # from now on the anchor's node keeps the accumulators alive
    set_sequence_number(anchor, graph.number)
    return anchor


def collect(graph: Graph, anchor: Tensor, outputs: list[Tensor]) -> tuple[Tensor, ...]:
    """The node next to the results; returns these, connected to the anchor."""
    with torch.enable_grad():
        apply: Callable[..., tuple[Tensor, ...]] = _Collect.apply
        connected = apply(graph, anchor, outputs)
    set_sequence_number(connected[0], FIRST)
    return connected


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graph: Graph, *inputs: Tensor) -> Tensor:
        ctx.graph = graph
        graph.inputs = Seen(inputs)
        return torch.zeros((), dtype=torch.float64, device="cpu")

    @staticmethod
    def backward(ctx: Any, ticket: Tensor) -> tuple[Tensor | None, ...]:
        finish = vars(ticket).pop("take_under_way")()
        try:
            return None, *finish()
        except BaseException as error:
            _note(error)
            raise


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graph: Graph, anchor: Tensor, outputs: list[Tensor]) -> tuple[Tensor, ...]:
        ctx.graph = graph
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *output_grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ((dispatch, _),) = ctx.next_functions
        wanted = tuple(engine_needs_node(node) for node, _ in dispatch.next_functions)
        if not any(wanted):  # the engine of torch.distributed.autograd does not say
            wanted = (True,) * len(wanted)
        ticket = torch.zeros((), dtype=torch.float64, device="cpu")
        try:
            # Only this run of the engine holds what is under way, which so goes with a backward that fails elsewhere.
            vars(ticket)["take_under_way"] = held_by_run(
                partial(ctx.graph.start_backward, output_grads, wanted)
            )
        except BaseException as error:
            _note(error)
            raise
        return None, ticket, None


def _note(error: BaseException) -> None:
    errors = errors_of_runs()
    if errors and (found := errors.get(engine_run())) is not None:
        found.append(error)
