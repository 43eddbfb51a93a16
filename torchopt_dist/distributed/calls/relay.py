"""Shares of a call → a message to each worker, or to few; there: to those below theirs, run the own, reply with all.

A share for a worker alone is sent as it is. One with others for the workers below goes as a :class:`Relay`, which is a
call of calls, as if a function had called the workers below: the worker's graph leads from the tensors that it received
through its own share, and through the *dispatch* and *collect* of each child. So tensors that shares have in common are
sent to a child once, their gradients are summed on the way back, and derivatives of every order are exact, as with
nested calls. The shares and results of other workers are forwarded as messages, without being rebuilt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from torchopt_dist._future import Future, as_completed
from torchopt_dist._serialized_exception import PassedOnError
from torchopt_dist.distributed.calls.graph import RemoteGraph
from torchopt_dist.distributed.calls.local import Here
from torchopt_dist.distributed.calls.siblings import Siblings
from torchopt_dist.distributed.group.chunks import Chunk
from torchopt_dist.distributed.group.group import Group, answering_group
from torchopt_dist.distributed.messages.message import Message
from torchopt_dist.distributed.messages.payload import ExecutionOptions
from torchopt_dist.distributed.messages.requests import Errand
from torchopt_dist.distributed.serialization.pickling import pack, raised, reply_of
from torchopt_dist.distributed.transport.ask import Sent
from torchopt_dist.distributed.transport.base import settle
from torchopt_dist.distributed.worker.chunk_requests import TakeChunk, arriving
from torchopt_dist.distributed.worker.device import receiving_device
from torchopt_dist.errors import WorkerLostError

__all__ = ["Branch", "Child", "Relay", "Sending", "send", "spread"]


class Branch(NamedTuple):
    """A worker, the message of its share, and the branches below it."""

    worker: int
    message: Message
    branches: tuple[Branch, ...] = ()

    def workers(self) -> list[int]:
        """The ranks of the worker and of all below it."""
        return [self.worker, *(worker for branch in self.branches for worker in branch.workers())]

    def messages(self) -> list[Message]:
        """Their messages, in the same order."""
        return [self.message, *(message for branch in self.branches for message in branch.messages())]


class Sending(NamedTuple):
    """What the shares of a call that are sent have in common.

    Attributes:
        seconds: how long the call may take; 0: for ever.
        keep: whether to keep graphs.
        options: of the call; ``None`` on a relay, which sends nothing again.
        mends: whether the caller sends again what lost workers were to forward, so that their loss is no error.
        as_sent: a function from a tensor of a message to the one to send.
        instead: by the id of a tensor of a message, the tensor to which the replies are connected in its place.
    """

    group: Group
    seconds: float
    keep: bool
    siblings: Siblings
    options: ExecutionOptions | None = None
    mends: bool = False
    as_sent: Callable[[Tensor], Tensor] = Tensor.detach
    instead: Mapping[int, Tensor] = {}

    def graph(self, worker: int) -> RemoteGraph:
        """The record of a graph that a worker is to keep."""
        group, seconds = self.group, self.seconds
        transport = group.transport.to(worker)
        return RemoteGraph(group, worker, transport, seconds, options=self.options, siblings=self.siblings)


def send(
    sending: Sending,
    graph: RemoteGraph,
    message: Message,
    late: Sequence[Tensor] = (),
    *,
    spent: int | None = None,
) -> tuple[Tensor | None, Future[Message]]:
    """Send a request, but for its tensors that come late; returns the anchor of its graph, and the future reply.

    ``spent`` is how many of the retries have been used, if another worker may be asked; ``None``: none may.
    """
    anchor, sent, record = None, message, graph.group.recorder.record
    if message.tensors:
        tensors = message.tensors
        if sending.instead:
            tensors = [sending.instead.get(id(tensor), tensor) for tensor in tensors]
        anchor = graph.connect(message.with_tensors(tensors), keep=sending.keep)
        sent = message.with_tensors([sending.as_sent(tensor) for tensor in message.tensors])
    if late:
        numbers = {id(tensor): number for number, tensor in enumerate(message.tensors)}
        for tensor in late:
            sent.tensors[numbers[id(tensor)]] = tensor.new_empty(0)
    if spent is None:
        reply = record("send", graph.key, graph.worker, graph.send, sent)
    else:
        kept = Sent.of(sent, None if message.key else graph.key)
        reply = record("send", graph.key, graph.worker, graph.ask, kept, spent=spent)
    if sending.siblings.log is not None:
        sending.siblings.log.watch(message, reply)
    return anchor, reply


class Child:
    """A worker below: one request to it, for its share and those of its branches, under a key of its own.

    The request is sent when this object is made. ``graph`` is the record of the graph that the worker keeps, with those
    of all below it; ``spent`` is as of :func:`send`.
    """

    def __init__(self, sending: Sending, branch: Branch, *, spent: int | None = None) -> None:
        self.branch = branch
        self.graph = graph = sending.graph(branch.worker)
        late = branch.message.late_tensors()
        with graph.span("pack") as span:
            message = span.made(self._request(sending))
        self._anchor, self.reply = send(sending, graph, message, late, spent=spent)
        if branch.message.late is not None and branch.message.late.chunks > 1:
            places = {id(tensor): place for place, tensor in enumerate(message.inputs())}
            graph.streamed = [places[id(tensor)] for tensor in late if id(tensor) in places]

    def _request(self, sending: Sending) -> Message:
        graph, branch = self.graph, self.branch
        if not branch.branches:
            return branch.message.with_tensors(branch.message.tensors, key=graph.key)
        return pack(Relay(graph.key, sending.keep, branch, sending.seconds, sending.mends), main_by_name=True)

    def hand_on(self, index: int, chunk: Chunk) -> None:
        """Send a part of the late tensors; the reply fails if it does not arrive, as for a lack of memory."""
        graph = self.graph
        with graph.span("send"):
            message = pack(TakeChunk(graph.key, False, index, chunk), main_by_name=True).detached()
            sent = graph.send(message)
        sent.add_done_callback(partial(_check_taken, graph, self.reply))

    def replies(self, reply: Message) -> dict[int, Message | None]:
        """The replies of the branch's workers, connected to what was sent, by rank.

        One that is lost has ``None``, and those below it are not there. Raises what one of them has raised.
        """
        graph = self.graph
        if self.branch.branches:
            values: list[dict[int, Message | None]] = graph.collect(self._anchor, reply)
            return values[0]
        if raised(reply):
            graph.values_of(reply)
        with graph.span("unpack"):
            connected = graph.connected(self._anchor, reply.received())
        found: dict[int, Message | None] = {self.branch.worker: connected}
        graph.found(connected, [found])
        return found


def spread(sending: Sending, branches: Iterable[Branch], chunks: Iterable[Chunk] = ()) -> list[Child]:
    """Send each branch its shares, and then all of them the chunks of their late tensors."""
    children = [Child(sending, branch) for branch in branches]
    for index, chunk in enumerate(chunks):
        for child in children:
            child.hand_on(index, chunk)
    return children


@dataclass(frozen=True)
class Relay(Errand):
    """Run the shares of a branch: the first here, the others on the workers below.

    A call of a child may take so many ``seconds`` (0: no limit); ``mends`` is as of :class:`Sending`. The tensors that
    come late are those of the own share's message, and others have them, too.
    """

    branch: Branch
    seconds: float
    mends: bool

    def values(self) -> list[Any]:
        """See :class:`Errand`."""
        group = answering_group()
        siblings = Siblings(error_of=PassedOnError)
        sending = Sending(group, self.seconds, self.keep, siblings, mends=self.mends)
        with arriving(self.branch.message, self.key) as chunks:
            children = spread(sending, self.branch.branches, chunks)
        if self.mends and group.has_gone(self.key):  # these shares run elsewhere now
            raise group.membership.loss_of(self.key[0])
        own = self._run_own(group)
        return [{self.branch.worker: own, **self._replies(group, children)}]

    def _run_own(self, group: Group) -> Message:
        message = self.branch.message
        # Messages that are sent are recorded by who sends them.
        here = Here(receiving_device(message.device), group, group.recorder.only("run", "backward"))
        graph = RemoteGraph(group, group.rank, here, 0, own=True)
        anchor = graph.connect(message, keep=self.keep)
        on_the_way = {id(tensor) for each in self.branch.messages()[1:] for tensor in each.tensors}
        on_the_way -= {id(tensor) for tensor in message.late_tensors()}  # of these the chunks are on the way
        sent = message.with_tensors(
            [
                tensor.detach().clone() if id(tensor) in on_the_way else tensor.detach()
                for tensor in message.tensors
            ],
            late=None,
            key=graph.key,
        )
        return graph.connected(anchor, here.send(group.rank, sent, 0).result().received())

    def _replies(self, group: Group, children: Sequence[Child]) -> dict[int, Message | None]:
        """The replies of all workers below; raises the first error that comes."""
        found: dict[int, Message | None] = {}
        by_reply = {child.reply: child for child in children}
        for reply in as_completed(by_reply):
            child = by_reply[reply]
            try:
                found.update(child.replies(reply.result()))
            except WorkerLostError as error:
                worker = child.branch.worker
                if not (self.mends and group.retries.is_loss(worker, error)):
                    raise
                found[worker] = None
        return {worker: found[worker] for worker in self.branch.workers() if worker in found}


def _check_taken(graph: RemoteGraph, reply: Future[Message], sent: Future[Message]) -> None:
    try:
        reply_of(sent.result(), graph.worker_name)
    except Exception as error:
        settle(reply, error.with_traceback(None))  # whose frames would keep the reply, and this the error
        graph.release()
