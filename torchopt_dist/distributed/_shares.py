"""The messages of a call, by worker → a future of each worker's reply, by way of a tree.

If workers of the tree are lost, and the call has ``retries``, what they were to forward is sent again down a tree of
the others, and their own shares go to workers that are free. The same is done if a backward finds workers lost, whose
graphs are lost, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import Tensor

from torchopt_dist._torch_private import tensor_version
from torchopt_dist.distributed._ask import ANOTHER_GRAPH, Deadline, check_unchanged, is_copied
from torchopt_dist.distributed._chunks import can_be_cut, chunks_of
from torchopt_dist.distributed._future import Future
from torchopt_dist.distributed._group import Group
from torchopt_dist.distributed._message import Message
from torchopt_dist.distributed._payload import ExecutionOptions
from torchopt_dist.distributed._protocol import Key
from torchopt_dist.distributed._relay import Branch, Children, Missing, Parcel
from torchopt_dist.distributed._siblings import Siblings
from torchopt_dist.distributed._tree import Twig, tree
from torchopt_dist.errors import CallTimeoutError, RemoteError, WorkerLostError

__all__ = ["Shares", "common"]


def common(held: Sequence[Iterable[Tensor]]) -> list[Tensor]:
    """The tensors that all have in common, in the order of the first."""
    ids = set.intersection(*({id(tensor) for tensor in tensors} for tensors in held))
    return list({id(tensor): tensor for tensor in held[0] if id(tensor) in ids}.values())


class Shares:
    """The shares of a call, which can be sent more than once.

    Args:
        group: the group.
        messages: the message of each worker.
        keys: the key of each message.
        options: of the call.
        fan_out: how many children a worker has.
        seconds: how long the call may take; 0: for ever.
        keep: whether to keep graphs.
        snapshot: send copies.
    """

    def __init__(
        self,
        group: Group,
        messages: Mapping[int, Message],
        keys: Mapping[int, Key],
        options: ExecutionOptions,
        *,
        fan_out: int,
        seconds: float,
        keep: bool,
        snapshot: bool,
    ) -> None:
        self._group = group
        self._messages = messages
        self._keys = keys
        self._options = options
        self._fan_out = fan_out
        self._seconds = seconds
        self._keep = keep
        sent = [
            Parcel.of(worker, keys[worker], message).sent().values() for worker, message in messages.items()
        ]
        shared = common(sent)
        self._hoisted = [tensor for tensor in shared if can_be_cut(tensor)]
        self._as_sent = _AsSent(messages.values(), snapshot=snapshot, again=options.retries > 0)
        self._avoided: set[int] = set()

    def send(
        self, workers: Iterable[int], siblings: Siblings, instead: Mapping[int, Tensor] | None = None
    ) -> dict[int, Future[Message]]:
        """Send the shares of these workers.

        Args:
            workers: their ranks.
            siblings: the shares of the same call.
            instead: by the id of a tensor of the messages, the tensor to which the replies are connected in its place.

        Returns:
            A future of each worker's reply, whose tensors are connected to those of the messages.
        """
        replies: dict[int, Future[Message]] = {worker: Future() for worker in workers}
        self._send(replies, siblings, instead or {})
        return replies

    def avoid(self, worker: int) -> None:
        """Let no tree lead through a worker any more."""
        self._avoided.add(worker)

    def _send(
        self, replies: Mapping[int, Future[Message]], siblings: Siblings, instead: Mapping[int, Tensor]
    ) -> None:
        group, mends = self._group, self._options.retries > 0
        alone = {
            worker
            for worker in replies
            if mends and (worker in self._avoided or group.retries.is_lost(worker))
        }
        self._avoided |= alone
        hosts = [member.host for member in group.members]
        twigs = tree(group.rank, [worker for worker in replies if worker not in alone], hosts, self._fan_out)
        busy = [ExitStack() for _ in twigs]
        with ExitStack() as undone:
            for twig, stack in zip(twigs, busy, strict=True) if mends else ():
                stack.enter_context(group.retries.busy(twig.workers()))
                undone.callback(stack.close)
            branches = [self._branch(twig) for twig in twigs]
            children = self._children(branches, self._hoisted, siblings, instead)
            hoisted = [self._as_sent(tensor) for tensor in self._hoisted] if twigs else []
            for index, chunk in enumerate(chunks_of(hoisted)):
                children.hand_on(index, chunk)
            undone.pop_all()
        for twig, stack, (reply, collect) in zip(twigs, busy, children.replies().items(), strict=True):
            branch = {worker: replies[worker] for worker in twig.workers()}
            reply.add_done_callback(partial(self._arrived, branch, collect, siblings, instead, stack))
        for worker in alone:
            branches = [self._branch(Twig(worker, ()))]
            children = self._children(branches, (), siblings, instead, alone=True)
            for reply, collect in children.replies().items():
                one = {worker: replies[worker]}
                reply.add_done_callback(partial(self._arrived, one, collect, siblings, instead, ExitStack()))

    def _children(
        self,
        branches: Sequence[Branch],
        hoisted: Sequence[Tensor],
        siblings: Siblings,
        instead: Mapping[int, Tensor],
        *,
        alone: bool = False,
    ) -> Children:
        again = partial(_RepliesAgain, self, instead) if self._options.retries else None
        return Children(
            self._group,
            branches,
            hoisted,
            len(chunks_of(hoisted)),
            self._seconds,
            keep=self._keep,
            siblings=siblings,
            prepare=self._as_sent,
            instead=instead,
            mends=self._options.retries > 0,
            options=self._options,
            alone=alone,
            again=again,
        )

    def _branch(self, twig: Twig) -> Branch:
        message = self._messages[twig.worker]
        parcel = Parcel.of(twig.worker, self._keys[twig.worker], message)
        return Branch(parcel, tuple(self._branch(each) for each in twig.twigs))

    def _arrived(
        self,
        replies: dict[int, Future[Message]],
        collect: Callable[[Message], list[Parcel | Missing]],
        siblings: Siblings,
        instead: Mapping[int, Tensor],
        busy: ExitStack,
        reply: Future[Message],
    ) -> None:
        """Pass the replies of a branch, or its error, to the futures of its workers."""
        busy.close()
        first = next(iter(replies))
        try:
            found = collect(reply.result())
        except Exception as error:
            alone = first in self._avoided
            if not (self._options.retries and not alone and self._group.retries.is_loss(first, error)):
                failure = self._late([*replies]) if type(error) is CallTimeoutError else error
                for future in replies.values():
                    future.set_exception(failure)
                return
            found = [Missing(first)]
        for each in found:
            if isinstance(each, Missing):
                self.avoid(each.worker)
            else:
                replies.pop(each.worker).set_result(each.message())
        if replies:
            self._group.threads.run(partial(self._send_again, replies, siblings, instead))

    def _send_again(
        self, replies: dict[int, Future[Message]], siblings: Siblings, instead: Mapping[int, Tensor]
    ) -> None:
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
        return CallTimeoutError(f"{which} took longer than timeout={self._seconds:g} s")

    def is_loss_of(self, workers: Iterable[int], asked: int, error: BaseException) -> int | None:
        """The one of ``workers`` that is lost, if the error of the one that was asked says so."""
        if not isinstance(error, WorkerLostError):
            return None
        retries = self._group.retries
        if not isinstance(error, RemoteError):
            return asked if retries.is_loss(asked, error) else None
        return error.rank if error.rank in workers and retries.goes_on_without(error.rank) else None

    def waiting(self) -> Any:
        """See :meth:`Retries.waiting`."""
        return self._group.retries.waiting(beside=True)


class _RepliesAgain:
    """The replies of a branch of the tree; see :class:`~torchopt_dist.distributed._again.Again`."""

    def __init__(self, shares: Shares, instead: Mapping[int, Tensor], workers: Sequence[int]) -> None:
        self.workers: Collection[int] = workers
        self._shares = shares
        self._instead = instead
        self._places: list[tuple[int, int]] = []

    def found(self, reply: Message, values: Iterable[Any]) -> None:
        """See :class:`~torchopt_dist.distributed._again.Again`."""
        places = {
            id(tensor): (parcel.worker, number)
            for parcel in values
            if isinstance(parcel, Parcel)
            for number, tensor in enumerate(parcel.tensors)
        }
        self._places = [places[id(reply.tensors[number])] for number in reply.connected]

    def avoid(self, worker: int) -> None:
        """See :class:`~torchopt_dist.distributed._again.Again`."""
        self._shares.avoid(worker)

    def outputs(
        self,
        numbers: Sequence[int],
        instead: Mapping[int, Tensor],
        left: ExecutionOptions,
        deadline: Deadline,
    ) -> list[Tensor]:
        """See :class:`~torchopt_dist.distributed._again.Again`; each loss of a worker of a tree is mended."""
        del left, deadline
        places = [self._places[number] for number in numbers]
        workers = dict.fromkeys(worker for worker, _ in places)
        of_messages = {which: instead.get(id(tensor), tensor) for which, tensor in self._instead.items()}
        replies = self._shares.send(workers, Siblings(), {**instead, **of_messages})
        with self._shares.waiting():
            messages = {worker: reply.result() for worker, reply in replies.items()}
        for worker, number in places:
            tensors = messages[worker].tensors
            if number >= len(tensors) or not tensors[number].requires_grad:
                raise RuntimeError(ANOTHER_GRAPH)
        return [messages[worker].tensors[number] for worker, number in places]

    def is_loss(self, worker: int, error: BaseException) -> bool:
        """See :class:`~torchopt_dist.distributed._again.Again`."""
        lost = self._shares.is_loss_of(self.workers, worker, error)
        if lost is not None:
            self._shares.avoid(lost)
        return lost is not None


class _AsSent:
    """A tensor of a message → what is sent of it, every time the same.

    Args:
        messages: the messages.
        snapshot: copy all tensors.
        again: copy small tensors and those that a module may change, and note how often others have been changed.
    """

    def __init__(self, messages: Iterable[Message], *, snapshot: bool, again: bool) -> None:
        self._copies: dict[int, Tensor] = {}
        self._versions: dict[int, int | None] = {}
        for message in messages if snapshot or again else ():
            for number, tensor in enumerate(message.tensors):
                if id(tensor) in self._copies or id(tensor) in self._versions:
                    continue
                if snapshot or is_copied(message, number):
                    self._copies[id(tensor)] = tensor.detach().clone()
                elif not tensor.is_inference():
                    self._versions[id(tensor)] = tensor_version(tensor)

    def __call__(self, tensor: Tensor) -> Tensor:
        """The tensor as it is sent.

        Raises:
            RuntimeError: it has been changed in place since it was sent first.
        """
        if id(tensor) in self._versions:
            check_unchanged(tensor, self._versions[id(tensor)])
        return self._copies.get(id(tensor), tensor).detach()
