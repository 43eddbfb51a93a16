"""The worker's side: request ``Message`` → reply ``Message``, and the graphs kept between the two ways of a gradient.

A call's tensors arrive as leaves. If the caller wants gradients, the graph from these to the results is kept under the
caller's key, until a backward uses it up or the caller releases it. A backward that is itself to be differentiated is
kept like a call, with the output gradients among its inputs.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch

from torchopt_dist._serialized_exception import SerializedException
from torchopt_dist.distributed import _execute
from torchopt_dist.distributed._device_placement import receiving_device
from torchopt_dist.distributed._protocol import SECOND_TIME, Backward, Call, Key, Release, Reply
from torchopt_dist.distributed._serialization import Message, pack, unpack
from torchopt_dist.errors import SerializationError

__all__ = ["handle_request", "kept_graphs"]


@dataclass
class _Graph:
    """A graph that is kept.

    Attributes:
        inputs: its leaves.
        outputs: what was sent from it; ``None`` for what a backward has used up.
        shared: whether the graph of a recorded backward has nodes in common with it. A backward through one of the two
            must then leave the nodes to the other, whatever their callers say; they go when both are forgotten.
    """

    inputs: list[torch.Tensor]
    outputs: list[Any]
    shared: bool = False


class _KeptGraphs:
    """The graphs of calls that this worker has answered, by key."""

    def __init__(self) -> None:
        self._graphs: dict[Key, _Graph] = {}
        self._given_up: set[Key] = set()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._graphs)

    def keep(self, key: Key, graph: _Graph) -> None:
        """Keep a graph, unless its caller has stopped waiting for it."""
        with self._lock:
            if key in self._given_up:
                self._given_up.remove(key)
            else:
                self._graphs[key] = graph

    def find(self, key: Key) -> _Graph:
        with self._lock:
            graph = self._graphs.get(key)
        if graph is None:
            raise RuntimeError(SECOND_TIME)
        return graph

    def use_up(self, key: Key, graph: _Graph, places: list[int]) -> None:
        """Forget some outputs of a graph, and with the last of them the graph."""
        with self._lock:
            for place in places:
                graph.outputs[place] = None
            if all(output is None for output in graph.outputs):
                self._graphs.pop(key, None)

    def release(self, key: Key) -> None:
        """Forget a graph: what is here, or will be, of a call that took longer than its caller would wait."""
        with self._lock:
            if self._graphs.pop(key, None) is None:
                self._given_up.add(key)

    def clear(self) -> None:
        with self._lock:
            self._graphs.clear()
            self._given_up.clear()


kept_graphs = _KeptGraphs()


def handle_request(request: Message) -> Message:
    """Do what a request asks; whatever goes wrong is the reply's failure."""
    request = request.received(receiving_device(request.device))
    try:
        return _handle(request)
    except BaseException as error:  # the caller is told, and this worker goes on serving
        failure = SerializedException.of(error)
        try:
            return pack(Reply(failure=failure), main_by_name=True).detached()
        except SerializationError:  # it holds something that cannot be sent
            return pack(Reply(failure=failure.in_words()), main_by_name=True).detached()


def _handle(request: Message) -> Message:
    content = unpack(request)
    if isinstance(content, Release):
        for key in content.graphs:
            kept_graphs.release(key)
        return pack(Reply(), main_by_name=True)
    if isinstance(content, Call):
        return _reply(_execute.run(content.payload), request.inputs(), content.keep_as)
    assert isinstance(content, Backward)
    graph = kept_graphs.find(content.graph)
    recorded = content.keep_as is not None
    graph.shared |= recorded
    reached = {place: grad for place, grad in enumerate(content.output_grads) if grad is not None}
    outputs = [graph.outputs[place] for place in reached]  # the caller asks for none that is used up
    if not content.retain_graph:
        kept_graphs.use_up(content.graph, graph, [*reached])
    input_grads = torch.autograd.grad(
        outputs,
        graph.inputs,
        [grad.to(y.device) for y, grad in zip(outputs, reached.values(), strict=True)],  # it may be on a CPU
        retain_graph=content.retain_graph or graph.shared,
        create_graph=recorded,
        allow_unused=True,
    )
    reply = _reply(list(input_grads), [*request.inputs(), *graph.inputs], content.keep_as, shared=recorded)
    reply.used_up = graph, outputs
    return reply


def _reply(
    values: list[Any], inputs: list[torch.Tensor], keep_as: Key | None, *, shared: bool = False
) -> Message:
    try:
        reply = pack(Reply(values), main_by_name=True)
    except SerializationError as error:
        raise SerializationError(f"the result cannot be sent: {error}") from error
    if keep_as is not None and inputs:
        leaves = {id(tensor) for tensor in inputs}
        outputs = {
            number: tensor
            for number, tensor in enumerate(reply.tensors)
            if tensor.requires_grad and (tensor.grad_fn is not None or id(tensor) in leaves)
        }
        if outputs:
            kept_graphs.keep(keep_as, _Graph(inputs, list(outputs.values()), shared))
            reply.connected = tuple(outputs)
    # What depends on this worker's own parameters alone would be a leaf there, and its backward reach nothing.
    reply.requires_grad = [
        wanted and (tensor.grad_fn is None or number in reply.connected)
        for number, (wanted, tensor) in enumerate(zip(reply.requires_grad, reply.tensors, strict=True))
    ]
    return reply.detached()
