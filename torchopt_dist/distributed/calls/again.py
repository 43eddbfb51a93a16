"""A graph whose worker is lost → its outputs again, made elsewhere; with these, the gradients that were asked for.

Only calls are sent again. If a worker is lost in a backward, or before, its graph is made again without it: the call is
sent once more, connected to views of the inputs, and what comes back is differentiated. So what comes out is connected
to the caller's graph to any order, whether the graph was one worker's or led through a tree of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from torchopt_dist.core.random_turns import lent
from torchopt_dist.distributed.calls.siblings import Siblings
from torchopt_dist.distributed.group.group import Group
from torchopt_dist.distributed.messages.caller_state import CallerState
from torchopt_dist.distributed.messages.message import Message
from torchopt_dist.distributed.messages.payload import ExecutionOptions
from torchopt_dist.distributed.messages.requests import Reply
from torchopt_dist.distributed.serialization.pickling import pack, unpack
from torchopt_dist.distributed.transport.retries import Deadline, Sent
from torchopt_dist.process.future import Future
from torchopt_dist.process.threads import when_late

__all__ = ["ANOTHER_GRAPH", "Again", "CallAgain", "GradientsAgain"]


ANOTHER_GRAPH = (
    "the share of a lost worker has another graph when it runs again: its function depends on more than its arguments "
    "and torch's random numbers"
)
"""The error text for a function that is not pure."""


class Again(Protocol):
    """What makes the outputs of a graph again."""

    def found(self, reply: Message, values: Iterable[Any]) -> None:
        """Note where the outputs are in the reply that has made the graph."""

    def outputs(
        self,
        numbers: Sequence[int],
        instead: Mapping[int, Tensor],
        left: ExecutionOptions,
        deadline: Deadline,
    ) -> list[Tensor]:
        """Make the outputs of these numbers again; waits until they are there.

        ``instead`` has, by the id of an input of the graph, the tensor to which they are connected in its place;
        ``left`` are the options of the call, with the retries that are left.
        """

    def is_loss(self, worker: int, error: BaseException) -> bool:
        """Whether the error of a reply, of the worker that was asked, says that one is lost, which is then avoided."""

    def avoid(self, worker: int) -> None:
        """Let no graph be made again on a worker that is late."""


class CallAgain:
    """The graph of one call on one worker; see :class:`Again`.

    ``new`` makes the record of such a graph, from what the shares of a call have in common.
    """

    def __init__(
        self,
        group: Group,
        sent: Sent,
        inputs: Sequence[Tensor],
        new: Callable[..., Any],
    ) -> None:
        self._group = group
        self._sent = sent
        self._inputs = inputs
        self._new = new
        self._avoided: set[int] = set()
        self._connected: tuple[int, ...] = ()

    def found(self, reply: Message, values: Iterable[Any]) -> None:
        """See :class:`Again`."""
        del values
        self._connected = reply.connected

    def outputs(
        self,
        numbers: Sequence[int],
        instead: Mapping[int, Tensor],
        left: ExecutionOptions,
        deadline: Deadline,
    ) -> list[Tensor]:
        """See :class:`Again`."""
        siblings = Siblings(self._group, deadline.left(), True, left)
        graph = self._new(siblings)
        message = self._sent.message
        inputs = [instead[id(tensor)] for tensor in self._inputs]
        places = iter(inputs)
        tensors = [
            next(places) if is_input else tensor
            for tensor, is_input in zip(message.tensors, message.requires_grad, strict=True)
        ]
        anchor = graph.connect(message.with_tensors(tensors), keep=True)
        graph.again = CallAgain(self._group, self._sent, inputs, self._new)
        asked = graph.ask(self._sent, avoided=frozenset(self._avoided))
        with lent():
            arrived = asked.result()
        siblings.seconds = deadline.left()
        reply = graph.connected(anchor, arrived.received())
        graph.again.found(reply, graph.values_of(reply))
        if reply.connected != self._connected:
            raise RuntimeError(ANOTHER_GRAPH)
        return [reply.tensors[self._connected[number]] for number in numbers]

    def is_loss(self, worker: int, error: BaseException) -> bool:
        """See :class:`Again`."""
        return self._group.retries.is_loss(worker, error)

    def avoid(self, worker: int) -> None:
        """See :class:`Again`."""
        self._avoided.add(worker)


class GradientsAgain:
    """The gradients of one backward through a graph, for the inputs that are wanted; see :class:`Again`.

    ``state`` is of the thread of the backward; with grad mode, the gradients are to be differentiated in turn.
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

    def take(self) -> list[Tensor | None] | None:
        """The gradients, if they have been made again; they are forgotten here."""
        made, self._made = self._made, None
        return made

    def found(self, reply: Message, values: Iterable[Any]) -> None:
        """See :class:`Again`."""
        places = {id(grad): place for place, grad in enumerate(values)}
        self.are_at([places[id(reply.tensors[number])] for number in reply.connected])

    def are_at(self, places: list[int]) -> None:
        """Note which of the gradients are the outputs of the backward's graph."""
        self._places = places

    def outputs(
        self,
        numbers: Sequence[int],
        instead: Mapping[int, Tensor],
        left: ExecutionOptions,
        deadline: Deadline,
    ) -> list[Tensor]:
        """See :class:`Again`."""
        grads = self._make(instead, left, deadline)
        found = [grads[self._places[number]] for number in numbers]
        outputs = [grad for grad in found if grad is not None and grad.requires_grad]
        if len(outputs) < len(found):
            raise RuntimeError(ANOTHER_GRAPH)
        return outputs

    def is_loss(self, worker: int, error: BaseException) -> bool:
        """See :class:`Again`."""
        return self._graph.is_loss(worker, error)

    def avoid(self, worker: int) -> None:
        """See :class:`Again`."""
        self._graph.avoid(worker)

    def instead_of(
        self,
        reply: Future[Message] | None,
        group: Group,
        worker: int,
        left: ExecutionOptions,
        deadline: Deadline,
    ) -> Future[Message]:
        """The reply to the backward, or an empty one as soon as the gradients are made again.

        They are if a worker is lost, if the reply is late, or if there is nobody to ask (``None``); what is there first
        counts. Whoever keeps the empty reply keeps no gradients, whose graph may lead back there.
        """
        settled: Future[Message] = Future()
        lock, at_work, begun = threading.Lock(), int(reply is not None), False

        def arrived(done: Future[Message]) -> None:
            error = done.exception()
            result: Message | BaseException = done.result() if error is None else error
            if isinstance(result, Message) and not result.tensors:
                content: Reply = unpack(result)
                if content.exception is not None:
                    error = content.exception.to_error(group.names[worker])
            if error is None or not (left.retries and self.is_loss(worker, error)):
                ended(result)
            elif not begin(replace(left, retries=left.retries - 1), beside=False):
                ended(error)

        def begin(left: ExecutionOptions, *, beside: bool) -> bool:
            """Make the gradients again, unless that has begun; ``beside`` the worker, or in its place."""
            nonlocal at_work, begun
            with lock:
                if begun or settled.done():
                    return False
                begun = True
                at_work += int(beside)
            group.threads.run(partial(make, left))
            return True

        def make(left: ExecutionOptions) -> None:
            result: Message | BaseException
            try:
                made = self._make({}, left, deadline)
                result = pack(Reply(), main_by_name=True)
                if not settled.done():
                    self._made = made
            except Exception as error:
                result = error
            ended(result)

        def ended(result: Message | BaseException) -> None:
            """Settle it, unless it is an error and somebody else is still at work."""
            nonlocal at_work
            with lock:
                at_work -= 1
                is_last = not at_work
            if isinstance(result, Message):
                settled.set_result(result)
            elif is_last:
                settled.set_exception(result)

        def late() -> None:
            self.avoid(worker)
            begin(replace(left, hedge_after=None), beside=True)

        if reply is None:
            begin(left, beside=True)
            return settled
        if left.hedge_after is not None:
            when_late(settled, left.hedge_after, late)
        reply.add_done_callback(arrived)
        return settled

    def _make(
        self, instead: Mapping[int, Tensor], left: ExecutionOptions, deadline: Deadline
    ) -> list[Tensor | None]:
        numbers = [number for number, grad in enumerate(self._output_grads) if grad is not None]
        output_grads = [instead.get(id(grad), grad) for grad in self._output_grads if grad is not None]
        with torch.enable_grad():
            # An input may depend on another one. What counts are its own gradients, so these are of views.
            inputs = [instead.get(id(tensor), tensor) for tensor in self._inputs]
            views = [tensor.view_as(tensor) for tensor in inputs]
            connected = {id(tensor): view for tensor, view in zip(self._inputs, views, strict=True)}
            outputs = self._graph.outputs(numbers, connected, left, deadline)
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
