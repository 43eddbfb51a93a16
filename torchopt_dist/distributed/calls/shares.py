"""The messages of a call, by worker → a future of each worker's reply, by way of a tree.

If workers of the tree are lost, and the call has ``retries``, what they were to forward is sent again down a tree of
the others, and their own shares go to other workers. The same is done if a backward finds workers lost, whose
graphs are lost, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from torchopt_dist.core.random_turns import lent
from torchopt_dist.distributed.calls.again import Again
from torchopt_dist.distributed.calls.relay import Branch, Child, spread
from torchopt_dist.distributed.calls.siblings import Siblings
from torchopt_dist.distributed.calls.tree import Twig, common, tree
from torchopt_dist.distributed.group.chunks import can_be_cut, chunks_of
from torchopt_dist.distributed.messages.message import Late, Message
from torchopt_dist.distributed.messages.payload import ExecutionOptions
from torchopt_dist.distributed.transport.pending import late
from torchopt_dist.distributed.transport.retries import AsSent, Deadline
from torchopt_dist.errors import CallTimeoutError, RemoteError, WorkerLostError
from torchopt_dist.process.future import Future

__all__ = ["Shares"]


class Shares:
    """The shares of a call that go down a tree, as copies if ``snapshot``; they can be sent more than once."""

    def __init__(
        self, siblings: Siblings, messages: Mapping[int, Message], fan_out: int, *, snapshot: bool
    ) -> None:
        self._siblings = siblings
        self._group = siblings.group
        self._messages = messages
        self._fan_out = fan_out
        self._mends = siblings.mends
        self._as_sent = AsSent(messages.values(), snapshot=snapshot, again=siblings.mends)
        shared = common([message.tensors for message in messages.values()])
        self._hoisted = [tensor for tensor in shared if can_be_cut(tensor)]
        self._chunks = len(chunks_of(self._hoisted))
        self._avoided: set[int] = set()

    def send(
        self, workers: Iterable[int], siblings: Siblings, instead: Mapping[int, Tensor] | None = None
    ) -> dict[int, Future[Message]]:
        """Send the shares of these workers; returns a future of each one's reply, connected to the messages' tensors.

        ``instead`` has, by the id of a tensor of the messages, the one to which replies are connected in its place.
        """
        replies: dict[int, Future[Message]] = {worker: Future() for worker in workers}
        self._send(replies, siblings, instead or {})
        return replies

    def _send(
        self, replies: Mapping[int, Future[Message]], siblings: Siblings, instead: Mapping[int, Tensor]
    ) -> None:
        group, mends = self._group, self._mends
        alone = {
            worker
            for worker in replies
            if mends and (worker in self._avoided or worker in group.membership.failures)
        }
        self._avoided |= alone
        hosts = [member.host for member in group.members]
        twigs = tree(group.rank, [worker for worker in replies if worker not in alone], hosts, self._fan_out)
        hoisted = [self._as_sent(tensor) for tensor in self._hoisted] if twigs else []
        branches = [self._branch(twig) for twig in twigs]
        for child in spread(siblings, branches, chunks_of(hoisted), as_sent=self._as_sent, instead=instead):
            workers = child.branch.workers()
            if mends:
                child.graph.again = self._again(instead, workers)
            branch = {worker: replies[worker] for worker in workers}
            child.reply.add_done_callback(partial(self._arrived, branch, child, instead))
        for worker in alone:
            spent = int(group.transport.to(worker).has_lost(worker))
            alone_there = Branch(worker, self._messages[worker])
            child = Child(siblings, alone_there, as_sent=self._as_sent, instead=instead, spent=spent)
            one = {worker: replies[worker]}
            child.reply.add_done_callback(partial(self._arrived, one, child, instead))

    def _branch(self, twig: Twig) -> Branch:
        message, hoisted = self._messages[twig.worker], self._hoisted
        if hoisted:
            places = {id(tensor): number for number, tensor in enumerate(message.tensors)}
            numbers = tuple(places[id(tensor)] for tensor in hoisted)
            shapes = tuple(tuple(tensor.shape) for tensor in hoisted)
            late = Late(numbers, shapes, self._chunks, self._siblings.seconds)
            message = message.with_tensors(message.tensors, late=late)
        return Branch(twig.worker, message, tuple(self._branch(each) for each in twig.twigs))

    def _arrived(
        self,
        replies: dict[int, Future[Message]],
        child: Child,
        instead: Mapping[int, Tensor],
        reply: Future[Message],
    ) -> None:
        """Pass the replies of a branch, or its error, to the futures of its workers."""
        first = child.branch.worker
        found: dict[int, Message | None] = {first: None}
        failure: Exception | None = None
        try:
            found = child.replies(reply.result())
        except Exception as error:
            alone = first in self._avoided
            if not (self._mends and not alone and self._group.retries.is_loss(first, error)):
                failure = self._late([*replies]) if type(error) is CallTimeoutError else error
        if failure is not None:
            for future in replies.values():
                future.set_exception(failure)
            del failure  # which refers to this frame
            return
        for worker, message in found.items():
            if message is None:
                self._avoided.add(worker)
            else:
                replies.pop(worker).set_result(message)
        if replies:
            siblings = child.graph.siblings
            self._group.threads.run(partial(self._mend, replies, siblings, instead))

    def _mend(
        self, replies: dict[int, Future[Message]], siblings: Siblings, instead: Mapping[int, Tensor]
    ) -> None:
        """Send again what has not arrived."""
        try:
            self._send(replies, siblings, instead)
        except Exception as error:
            for future in replies.values():
                if not future.done():
                    future.set_exception(error)

    def _late(self, workers: Sequence[int]) -> CallTimeoutError:
        """Nobody here knows which worker of a branch is late."""
        names = [self._group.names[worker] for worker in workers]
        which = f"one of {', '.join(names)}" if len(names) > 1 else names[0]
        return late(self._siblings.function, which, self._siblings.seconds)

    def _again(self, connected: Mapping[int, Tensor], workers: Sequence[int]) -> Again:
        """What makes the replies of a branch again, by a call of its own; each loss of a worker is mended."""

        def make(
            outputs: Sequence[tuple[int, int]],
            numbers: Sequence[int],
            instead: Mapping[int, Tensor],
            left: ExecutionOptions,
            deadline: Deadline,
        ) -> Mapping[tuple[int, int], Tensor]:
            del left, deadline
            of_messages = {which: instead.get(id(tensor), tensor) for which, tensor in connected.items()}
            siblings = replace(self._siblings, log=None, took=None)
            asked = dict.fromkeys(outputs[number][0] for number in numbers)
            replies = self.send(asked, siblings, {**instead, **of_messages})
            with lent():
                return _tensors_of({worker: reply.result() for worker, reply in replies.items()})

        def is_loss(asked: int, error: BaseException) -> bool:
            lost = self._lost(workers, asked, error)
            if lost is not None:
                self._avoided.add(lost)
            return lost is not None

        return Again(make, lambda _, values: _tensors_of(values[0]), is_loss, self._avoided.add)

    def _lost(self, workers: Sequence[int], asked: int, error: BaseException) -> int | None:
        """The one of ``workers`` that is lost, if the error of the one that was asked says so."""
        if not isinstance(error, WorkerLostError):
            return None
        group = self._group
        if not isinstance(error, RemoteError):
            return asked if group.retries.is_loss(asked, error) else None
        lost = error.rank
        return lost if lost in workers and group.membership.goes_on_without(lost) else None


def _tensors_of(replies: Mapping[int, Message | None]) -> dict[tuple[int, int], Tensor]:
    """By worker and number."""
    return {
        (worker, number): tensor
        for worker, reply in replies.items()
        if reply is not None
        for number, tensor in enumerate(reply.tensors)
    }
