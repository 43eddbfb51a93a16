"""A graph whose worker is lost → its outputs again, made elsewhere; with these, the gradients that were asked for.

Only calls are sent again. If a worker is lost in a backward, or before, its graph is made again without it: the call is
sent once more, connected to views of the inputs, and what comes back is differentiated. So what comes out is connected
to the caller's graph to any order, whether the graph was one worker's or led through a tree of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchopt_dist.core.random_turns import lent
from torchopt_dist.distributed.calls.siblings import Siblings
from torchopt_dist.distributed.group.group import Group
from torchopt_dist.distributed.messages.caller_state import CallerState
from torchopt_dist.distributed.messages.message import Message
from torchopt_dist.distributed.messages.payload import ExecutionOptions
from torchopt_dist.distributed.messages.requests import Reply
from torchopt_dist.distributed.serialization.pickling import pack, reply_of
from torchopt_dist.distributed.transport.retries import Deadline, Sent
from torchopt_dist.process.future import Future
from torchopt_dist.process.threads import when_late

__all__ = ["ANOTHER_GRAPH", "Again", "call_again", "gradients_again"]


ANOTHER_GRAPH = (
    "the share of a lost worker has another graph when it runs again: its function depends on more than its arguments "
    "and torch's random numbers"
)
"""The error text for a function that is not pure."""


@dataclass(eq=False)
class Again:
    """What makes the outputs of a graph again.

    Attributes:
        make: makes them again, and waits until they are there. It gets the keys of all outputs, and the numbers of
            those that are wanted; by the id of an input of the graph, the tensor to which they are connected in its
            place; and the options of the call, with the retries that are left.
        keys: of a reply that has made the graph, and of its values: the tensors, each with its key.
        is_loss: whether the error of a reply, of the worker that was asked, says that one is lost, which is avoided
            then.
        avoid: lets no graph be made again on a worker that is late.
    """

    make: Callable[
        [Sequence[Any], Sequence[int], Mapping[int, Tensor], ExecutionOptions, Deadline],
        Mapping[Any, Tensor | None],
    ]
    keys: Callable[[Message, Sequence[Any]], Mapping[Any, Tensor | None]]
    is_loss: Callable[[int, BaseException], bool]
    avoid: Callable[[int], object]
    outputs: Sequence[Hashable] = ()
    made: list[Tensor | None] | None = None

    def found(self, reply: Message, values: Sequence[Any]) -> None:
        """Note where the outputs are in the reply that has made the graph."""
        keys = {id(tensor): key for key, tensor in self.keys(reply, values).items()}
        self.outputs = [keys[id(reply.tensors[number])] for number in reply.connected]

    def outputs_of(
        self,
        numbers: Sequence[int],
        instead: Mapping[int, Tensor],
        left: ExecutionOptions,
        deadline: Deadline,
    ) -> list[Tensor]:
        """The outputs of these numbers, made again; see ``make``."""
        made = self.make(self.outputs, numbers, instead, left, deadline)
        found = [made.get(self.outputs[number]) for number in numbers]
        outputs = [tensor for tensor in found if tensor is not None and tensor.requires_grad]
        if len(outputs) < len(found):
            raise RuntimeError(ANOTHER_GRAPH)
        return outputs

    def take(self) -> list[Tensor | None] | None:
        """What has been made in the place of a reply; it is forgotten here."""
        made, self.made = self.made, None
        return made

    def instead_of(
        self,
        reply: Future[Message] | None,
        group: Group,
        worker: int,
        left: ExecutionOptions,
        deadline: Deadline,
    ) -> Future[Message]:
        """The reply to a backward, or an empty one as soon as its gradients are made again, for :meth:`take`.

        They are if a worker is lost, if the reply is late, or if there is nobody to ask (``None``); what is there first
        counts. Whoever keeps the empty reply keeps no gradients, whose graph may lead back there.
        """
        settled: Future[Message] = Future()
        lock, at_work, begun = threading.Lock(), int(reply is not None), False

        def arrived(done: Future[Message]) -> None:
            error = done.exception()
            result: Message | BaseException = done.result() if error is None else error
            if isinstance(result, Message) and result.told is not None:
                try:
                    reply_of(result, group.names[worker])
                except Exception as raised:
                    error = raised.with_traceback(None)  # whose frames would hold this one
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
                made = self.make((), (), {}, left, deadline)
                result = pack(Reply(), main_by_name=True)
                if not settled.done():
                    self.made = [*made.values()]
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


def call_again(group: Group, sent: Sent, inputs: Sequence[Tensor], new: Callable[..., Any]) -> Again:
    """What makes the graph of one call on one worker again, by a call that is sent once more.

    ``new`` makes the record of such a graph, from what the shares of a call have in common.
    """
    avoided: set[int] = set()

    def make(
        outputs: Sequence[int],
        numbers: Sequence[int],
        instead: Mapping[int, Tensor],
        left: ExecutionOptions,
        deadline: Deadline,
    ) -> Mapping[int, Tensor]:
        del numbers
        siblings = Siblings(group, deadline.left(), True, left)
        graph = new(siblings)
        message = sent.message
        own = [instead[id(tensor)] for tensor in inputs]
        places = iter(own)
        tensors = [
            next(places) if is_input else tensor
            for tensor, is_input in zip(message.tensors, message.requires_grad, strict=True)
        ]
        anchor = graph.connect(message.with_tensors(tensors), keep=True)
        graph.again = call_again(group, sent, own, new)
        asked = graph.ask(sent, avoided=frozenset(avoided))
        with lent():
            arrived = asked.result()
        siblings.seconds = deadline.left()
        reply = graph.connected(anchor, arrived.received())
        graph.again.found(reply, graph.values_of(reply))
        if [*reply.connected] != [*outputs]:
            raise RuntimeError(ANOTHER_GRAPH)
        return dict(enumerate(reply.tensors))

    return Again(make, lambda reply, _: dict(enumerate(reply.tensors)), group.retries.is_loss, avoided.add)


def gradients_again(
    graph: Again,
    output_grads: Sequence[Tensor | None],
    wanted: Sequence[bool],
    inputs: Sequence[Tensor],
    state: CallerState,
) -> Again:
    """What makes the gradients of one backward through a graph again, for the inputs that are wanted.

    ``state`` is of the thread of the backward; with grad mode, the gradients are to be differentiated in turn.
    """
    reached = [number for number, grad in enumerate(output_grads) if grad is not None]

    def make(
        outputs: Sequence[int],
        numbers: Sequence[int],
        instead: Mapping[int, Tensor],
        left: ExecutionOptions,
        deadline: Deadline,
    ) -> Mapping[int, Tensor | None]:
        del outputs, numbers
        given = [instead.get(id(grad), grad) for grad in output_grads if grad is not None]
        with torch.enable_grad():
            # An input may depend on another one. What counts are its own gradients, so these are of views.
            views = [instead.get(id(tensor), tensor) for tensor in inputs]
            views = [tensor.view_as(tensor) for tensor in views]
            connected = {id(tensor): view for tensor, view in zip(inputs, views, strict=True)}
            results = graph.outputs_of(reached, connected, left, deadline)
        with state.applied():
            found = iter(
                torch.autograd.grad(
                    results,
                    [view for view, is_wanted in zip(views, wanted, strict=True) if is_wanted],
                    given,
                    create_graph=state.grad_enabled,
                    allow_unused=True,
                )
            )
        return {place: next(found) if is_wanted else None for place, is_wanted in enumerate(wanted)}

    return Again(make, lambda _, grads: dict(enumerate(grads)), graph.is_loss, graph.avoid)
