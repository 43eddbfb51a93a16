"""The messages of a call, by worker → a future of each worker's reply, by way of a tree.

If workers of the tree are lost, and the call has ``retries``, what they were to forward is sent again down a tree of
the others, and their own shares go to other workers. The same is done if a backward finds workers lost, whose
graphs are lost, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from torchopt_dist.core.random_turns import lent
from torchopt_dist.distributed.calls.again import ANOTHER_GRAPH
from torchopt_dist.distributed.calls.relay import Branch, Child, spread
from torchopt_dist.distributed.calls.siblings import Siblings
from torchopt_dist.distributed.calls.tree import Twig, common, tree
from torchopt_dist.distributed.group.chunks import can_be_cut, chunks_of
from torchopt_dist.distributed.messages.message import Late, Message
from torchopt_dist.distributed.messages.payload import ExecutionOptions
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

    def send_again(self, workers: Iterable[int], instead: Mapping[int, Tensor]) -> dict[int, Future[Message]]:
        """The same as a call of its own."""
        return self.send(workers, replace(self._siblings, log=None, took=None), instead)

    def avoid(self, worker: int) -> None:
        """Let no tree lead through a worker any more."""
        self._avoided.add(worker)

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
                child.graph.again = _RepliesAgain(self, instead, workers)
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
        found: dict[int, Message | None]
        try:
            found = child.replies(reply.result())
        except Exception as error:
            alone = first in self._avoided
            if not (self._mends and not alone and self._group.retries.is_loss(first, error)):
                failure = self._late([*replies]) if type(error) is CallTimeoutError else error
                for future in replies.values():
                    future.set_exception(failure)
                return
            found = {first: None}
        for worker, message in found.items():
            if message is None:
                self.avoid(worker)
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
        return CallTimeoutError(f"{which} took longer than timeout={self._siblings.seconds:g} s")

    def is_loss_of(self, workers: Iterable[int], asked: int, error: BaseException) -> int | None:
        """The one of ``workers`` that is lost, if the error of the one that was asked says so."""
        if not isinstance(error, WorkerLostError):
            return None
        group = self._group
        if not isinstance(error, RemoteError):
            return asked if group.retries.is_loss(asked, error) else None
        lost = error.rank
        return lost if lost in workers and group.membership.goes_on_without(lost) else None


class _RepliesAgain:
    """The replies of a branch of the tree; see :class:`~torchopt_dist.distributed.calls.again.Again`."""

    def __init__(self, shares: Shares, instead: Mapping[int, Tensor], workers: Sequence[int]) -> None:
        self._workers = workers
        self._shares = shares
        self._instead = instead
        self._places: list[tuple[int, int]] = []

    def found(self, reply: Message, values: Iterable[Any]) -> None:
        """See :class:`~torchopt_dist.distributed.calls.again.Again`."""
        places = {
            id(tensor): (worker, number)
            for found in values
            for worker, message in found.items()
            if message is not None
            for number, tensor in enumerate(message.tensors)
        }
        self._places = [places[id(reply.tensors[number])] for number in reply.connected]

    def avoid(self, worker: int) -> None:
        """See :class:`~torchopt_dist.distributed.calls.again.Again`."""
        self._shares.avoid(worker)

    def outputs(
        self,
        numbers: Sequence[int],
        instead: Mapping[int, Tensor],
        left: ExecutionOptions,
        deadline: Deadline,
    ) -> list[Tensor]:
        """See :class:`~torchopt_dist.distributed.calls.again.Again`; each loss of a worker of a tree is mended."""
        del left, deadline
        places = [self._places[number] for number in numbers]
        workers = dict.fromkeys(worker for worker, _ in places)
        of_messages = {which: instead.get(id(tensor), tensor) for which, tensor in self._instead.items()}
        replies = self._shares.send_again(workers, {**instead, **of_messages})
        with lent():
            messages = {worker: reply.result() for worker, reply in replies.items()}
        for worker, number in places:
            tensors = messages[worker].tensors
            if number >= len(tensors) or not tensors[number].requires_grad:
                raise RuntimeError(ANOTHER_GRAPH)
        return [messages[worker].tensors[number] for worker, number in places]

    def is_loss(self, worker: int, error: BaseException) -> bool:
        """See :class:`~torchopt_dist.distributed.calls.again.Again`."""
        lost = self._shares.is_loss_of(self._workers, worker, error)
        if lost is not None:
            self._shares.avoid(lost)
        return lost is not None
