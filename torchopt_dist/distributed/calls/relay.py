"""Shares of a call → a message to each worker, or to few; there: to those below theirs, run the own, reply with all.

A share for a worker alone is sent as it is. One with others for the workers below goes as a :class:`Relay`, which is a
call of calls, as if a function had called the workers below: the worker's graph leads from the tensors that it received
through its own share, and through the *dispatch* and *collect* of each child. So tensors that shares have in common are
sent to a child once, their gradients are summed on the way back, and derivatives of every order are exact, as with
nested calls. The shares and results of other workers are forwarded as messages, without being rebuilt.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torchopt_dist.distributed.calls.graph import RemoteGraph
from torchopt_dist.distributed.calls.local import Here
from torchopt_dist.distributed.calls.siblings import Siblings
from torchopt_dist.distributed.group.chunks import Chunk
from torchopt_dist.distributed.group.group import Group, answering_group
from torchopt_dist.distributed.messages.message import Message
from torchopt_dist.distributed.messages.requests import Errand
from torchopt_dist.distributed.serialization.pickling import pack, reply_of
from torchopt_dist.distributed.worker.chunk_requests import TakeChunk, arriving
from torchopt_dist.distributed.worker.device import receiving_device
from torchopt_dist.errors import WorkerLostError
from torchopt_dist.pickling.serialized_exception import PassedOnError
from torchopt_dist.process.future import Future, as_completed

__all__ = ["Branch", "Child", "Relay", "spread"]


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


class Child:
    """A worker below: one request to it, for its share and those of its branches, under a key of its own.

    The request is sent when this object is made. ``graph`` is the record of the graph that the worker keeps, with those
    of all below it; ``how`` is as of :meth:`RemoteGraph.begin`.
    """

    def __init__(self, siblings: Siblings, branch: Branch, **how: Any) -> None:
        self.branch = branch
        self.graph = graph = RemoteGraph(siblings, branch.worker)
        late = branch.message.late_tensors()
        with graph.span("pack") as span:
            message = span.made(self._request())
            message.function = siblings.function
        self._anchor, self.reply = graph.begin(message, late, **how)
        if branch.message.late is not None and branch.message.late.chunks > 1:
            places = {id(tensor): place for place, tensor in enumerate(message.inputs())}
            graph.streamed = [places[id(tensor)] for tensor in late if id(tensor) in places]

    def _request(self) -> Message:
        graph, branch, siblings = self.graph, self.branch, self.graph.siblings
        if not branch.branches:
            return branch.message.with_tensors(branch.message.tensors, key=graph.key)
        return pack(
            Relay(graph.key, siblings.keep, branch, siblings.seconds, siblings.mends, siblings.function),
            main_by_name=True,
        )

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
        if reply.told is not None:
            graph.values_of(reply)
        with graph.span("unpack"):
            connected = graph.connected(self._anchor, reply.received())
        found: dict[int, Message | None] = {self.branch.worker: connected}
        graph.found(connected, [found])
        return found


def spread(
    siblings: Siblings, branches: Iterable[Branch], chunks: Iterable[Chunk] = (), **how: Any
) -> list[Child]:
    """Send each branch its shares, and then all of them the chunks of their late tensors; see :class:`Child`."""
    children = [Child(siblings, branch, **how) for branch in branches]
    for index, chunk in enumerate(chunks):
        for child in children:
            child.hand_on(index, chunk)
    return children


@dataclass(frozen=True)
class Relay(Errand):
    """Run the shares of a branch: the first here, the others on the workers below.

    A call of a child may take so many ``seconds`` (0: no limit); ``mends`` and ``function`` are as of
    :class:`Siblings`. The tensors that come late are those of the own share's message, and others have them, too.
    """

    branch: Branch
    seconds: float
    mends: bool
    function: str

    def values(self) -> list[Any]:
        """See :class:`Errand`."""
        group = answering_group()
        siblings = Siblings(group, self.seconds, self.keep, mends=self.mends, error_of=PassedOnError)
        siblings.function = self.function
        with arriving(self.branch.message, self.key) as chunks:
            children = spread(siblings, self.branch.branches, chunks)
        if self.mends and group.has_gone(self.key):  # these shares run elsewhere now
            raise group.membership.loss_of(self.key[0])
        own = self._run_own(group)
        return [{self.branch.worker: own, **self._replies(group, children)}]

    def _run_own(self, group: Group) -> Message:
        message = self.branch.message
        # Messages that are sent are recorded by who sends them.
        here = Here(receiving_device(message.device), group, group.recorder.only("run", "backward"))
        graph = RemoteGraph(Siblings(group, 0, self.keep), group.rank, here, own=True)
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
        reply.set_exception(
            error.with_traceback(None)
        )  # whose frames would keep the reply, and this the error
        graph.release()
