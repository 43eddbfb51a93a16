"""A graph that lost workers kept → its outputs again, made elsewhere; with these, the gradients that were asked for.

A graph in a tree leads through several workers. If one of them is lost in a backward, the graph is made again without
it, from the same inputs, and differentiated there. So what comes out is connected to the caller's graph to any order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from torchopt_dist.distributed._ask import ANOTHER_GRAPH
from torchopt_dist.distributed._caller_state import CallerState
from torchopt_dist.distributed._chunks import Arriving
from torchopt_dist.distributed._future import Future
from torchopt_dist.distributed._group import Group
from torchopt_dist.distributed._message import Message
from torchopt_dist.distributed._protocol import Reply
from torchopt_dist.distributed._serialization import pack, unpack
from torchopt_dist.distributed._versions import Seen
from torchopt_dist.distributed.transport.base import settle

__all__ = ["Again", "GradientsAgain", "UnderWay"]

Graph = TypeVar("Graph")


class Again(Protocol):
    """What makes the outputs of a graph again.

    Attributes:
        workers: the ranks of those that keep the graph.
    """

    workers: Collection[int]

    def found(self, outputs: Sequence[Tensor], values: Iterable[Any]) -> None:
        """Note where the outputs are among the values of the reply."""

    def outputs(self, numbers: Sequence[int], instead: Mapping[int, Tensor]) -> list[Tensor]:
        """Make outputs again; waits until they are there.

        Args:
            numbers: of these outputs.
            instead: by the id of an input of the graph, the tensor to which they are connected in its place.
        """

    def is_loss(self, worker: int, error: BaseException) -> bool:
        """Whether one of the workers is lost, which is then avoided.

        Args:
            worker: the one that was asked.
            error: of its reply.
        """


class GradientsAgain:
    """The gradients of one backward; see :class:`Again`.

    Args:
        graph: the graph that is differentiated.
        output_grads: the gradient of each of its outputs that takes part.
        wanted: for each of its inputs, whether the gradient is wanted.
        inputs: its inputs.
        state: of the thread of the backward; with grad mode, the gradients are to be differentiated in turn.
    """

    def __init__(
        self,
        graph: Again,
        output_grads: Sequence[Tensor | None],
        wanted: Sequence[bool],
        inputs: Sequence[Tensor],
        state: CallerState,
    ) -> None:
        self._graph = graph
        self._output_grads = output_grads
        self._wanted = wanted
        self._inputs = inputs
        self._state = state
        self._places: list[int] = []
        self._made: list[Tensor | None] | None = None
        self.workers = graph.workers

    def take(self) -> list[Tensor | None] | None:
        """The gradients, if they have been made again; they are forgotten here."""
        made, self._made = self._made, None
        return made

    def found(self, outputs: Sequence[Tensor], values: Iterable[Any]) -> None:
        """See :class:`Again`."""
        places = {id(grad): place for place, grad in enumerate(values)}
        self._places = [places[id(output)] for output in outputs]

    def outputs(self, numbers: Sequence[int], instead: Mapping[int, Tensor]) -> list[Tensor]:
        """See :class:`Again`."""
        grads = self._make(instead)
        found = [grads[self._places[number]] for number in numbers]
        outputs = [grad for grad in found if grad is not None and grad.requires_grad]
        if len(outputs) < len(found):
            raise RuntimeError(ANOTHER_GRAPH)
        return outputs

    def is_loss(self, worker: int, error: BaseException) -> bool:
        """See :class:`Again`."""
        return self._graph.is_loss(worker, error)

    def instead_of(self, reply: Future[Message], group: Group, worker: int) -> Future[Message]:
        """The reply to the backward, or if a worker is lost, an empty one as soon as the gradients are made again.

        Whoever keeps that reply keeps no gradients, whose graph may lead back there.

        Args:
            reply: the reply.
            group: the group.
            worker: the one that sends it.
        """
        settled: Future[Message] = Future()
        busy = ExitStack()
        busy.enter_context(group.retries.busy(self.workers))

        def arrived(done: Future[Message]) -> None:
            busy.close()
            error = done.exception()
            if error is None and not done.result().tensors:
                content: Reply = unpack(done.result())
                if content.exception is not None:
                    error = content.exception.to_error(group.names[worker])
            if error is not None and self.is_loss(worker, error):
                group.threads.run(make)
            else:
                _pass_on(done, settled)

        def make() -> None:
            try:
                self._made = self._make({})
                settle(settled, pack(Reply(), main_by_name=True))
            except Exception as error:
                settle(settled, error)

        reply.add_done_callback(arrived)
        return settled

    def _make(self, instead: Mapping[int, Tensor]) -> list[Tensor | None]:
        numbers = [number for number, grad in enumerate(self._output_grads) if grad is not None]
        output_grads = [instead.get(id(grad), grad) for grad in self._output_grads if grad is not None]
        with torch.enable_grad():
            # An input may depend on another one. What counts are its own gradients, so these are of views.
            inputs = [instead.get(id(tensor), tensor) for tensor in self._inputs]
            views = [tensor.view_as(tensor) for tensor in inputs]
            connected = {id(tensor): view for tensor, view in zip(self._inputs, views, strict=True)}
            outputs = self._graph.outputs(numbers, connected)
        with self._state.applied():
            found = iter(
                torch.autograd.grad(
                    outputs,
                    [view for view, wanted in zip(views, self._wanted, strict=True) if wanted],
                    output_grads,
                    create_graph=self._state.grad_enabled,
                    allow_unused=True,
                )
            )
        return [next(found) if wanted else None for wanted in self._wanted]


class UnderWay(NamedTuple, Generic[Graph]):
    """A backward that is running.

    Attributes:
        message: the message of the request.
        reply: the future reply.
        graph: the graph of the backward itself.
        inputs: the call's inputs, as they were at the call.
        arriving: the gradients that come in chunks.
        streamed: the places of the inputs that these are of.
        again: makes the gradients if workers are lost.
    """

    message: Message
    reply: Future[Message]
    graph: Graph
    inputs: Seen
    arriving: Arriving | None
    streamed: Sequence[int]
    again: GradientsAgain | None


def _pass_on(done: Future[Message], settled: Future[Message]) -> None:
    error = done.exception()
    if error is None:
        settled.set_result(done.result())
    else:
        settled.set_exception(error)
