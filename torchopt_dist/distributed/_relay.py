"""A share and those of the workers below in the tree → on a worker: forward the others, run its own, reply with all.

Such a request is a call of calls, as if a function had called the workers below: the worker's graph leads from the
tensors that it received through its own share, and through the *dispatch* and *collect* of each child. So tensors that
shares have in common are sent to a child once, their gradients are summed on the way back, and derivatives of every
order are exact, as with nested calls. The shares and results of other workers are forwarded as messages, without being
rebuilt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchopt_dist._serialized_exception import PassedOnError
from torchopt_dist.distributed._again import Again
from torchopt_dist.distributed._ask import Sent
from torchopt_dist.distributed._chunk_requests import TakeChunk
from torchopt_dist.distributed._chunks import Chunk
from torchopt_dist.distributed._device_placement import receiving_device
from torchopt_dist.distributed._future import Future, as_completed
from torchopt_dist.distributed._group import Group, answering_group
from torchopt_dist.distributed._here import Here
from torchopt_dist.distributed._message import Message
from torchopt_dist.distributed._payload import ExecutionOptions
from torchopt_dist.distributed._protocol import Errand, Key, Reply
from torchopt_dist.distributed._remote_graph import RemoteGraph
from torchopt_dist.distributed._serialization import pack, unpack
from torchopt_dist.distributed._siblings import Siblings
from torchopt_dist.distributed.transport.base import settle
from torchopt_dist.errors import WorkerLostError

__all__ = ["Branch", "Children", "Missing", "Parcel"]


class Parcel(NamedTuple):
    """A message inside another one.

    Attributes:
        worker: the rank of the worker to which, or from which, it is sent.
        key: the key of the call.
        skeleton: as in the message; so are ``structures``, ``holes``, ``device`` and ``references``.
        tensors: the tensors of the message, which the other message has, too.
    """

    worker: int
    key: Key
    skeleton: bytes
    tensors: tuple[Tensor, ...]
    structures: tuple[bytes, ...]
    holes: tuple[tuple[int, int], ...]
    device: str | None
    references: tuple[Any, ...]

    @classmethod
    def of(cls, worker: int, key: Key, message: Message) -> Parcel:
        """The parcel of a message."""
        return cls(
            worker,
            key,
            message.skeleton,
            tuple(message.tensors),
            message.structures,
            message.holes,
            message.device,
            tuple(message.references),
        )

    def message(self) -> Message:
        """The message again, with all tensors, also those that the worker had."""
        return Message(
            self.skeleton,
            list(self.tensors),
            [tensor.requires_grad for tensor in self.tensors],
            [isinstance(tensor, nn.Parameter) for tensor in self.tensors],
            self.structures,
            holes=self.holes,
            device=self.device,
            references=list(self.references),
        )

    def sent(self) -> dict[int, Tensor]:
        """The tensors, by their ids."""
        return {id(tensor): tensor for tensor in self.tensors}


class Missing(NamedTuple):
    """In the place of the replies of a branch: its first worker is lost.

    Attributes:
        worker: the rank of that worker.
    """

    worker: int


class Branch(NamedTuple):
    """A worker's share, and those of the workers below it."""

    parcel: Parcel
    branches: tuple[Branch, ...]

    def parcels(self) -> list[Parcel]:
        """All shares, the worker's own first."""
        return [self.parcel, *(parcel for branch in self.branches for parcel in branch.parcels())]


class Children:
    """The workers to which a worker forwards shares.

    Args:
        group: the group.
        branches: the shares of each child and of the workers below it.
        hoisted: tensors of all shares, which go to the children in chunks.
        chunks: how many chunks there are.
        seconds: how long a call may take; 0: for ever.
        keep: whether to keep graphs.
        siblings: the shares of these calls.
        prepare: a function from a tensor to the one to send.
        instead: by the id of a tensor of the shares, the tensor to which the replies are connected in its place.
        mends: whether the caller sends again what lost workers were to forward, so that their loss is no error.
        options: the options of the call.
        alone: whether these shares may run on any worker, each by itself.
        again: makes what makes the graphs of a branch again, from the ranks of its workers; ``None``: nothing does.
    """

    def __init__(
        self,
        group: Group,
        branches: Sequence[Branch],
        hoisted: Sequence[Tensor],
        chunks: int,
        seconds: float,
        *,
        keep: bool,
        siblings: Siblings,
        prepare: Callable[[Tensor], Tensor] = Tensor.detach,
        instead: Mapping[int, Tensor] | None = None,
        mends: bool = False,
        options: ExecutionOptions | None = None,
        alone: bool = False,
        again: Callable[[list[int]], Again] | None = None,
    ) -> None:
        self._group = group
        self._mends = mends
        self._children = [_Child(group, branch, seconds, siblings, options, alone) for branch in branches]
        for child in self._children:
            child.start(hoisted, chunks, keep, mends, prepare, instead or {})
            if again is not None and not alone:
                child.graph.again = again([parcel.worker for parcel in child.branch.parcels()])

    def hand_on(self, index: int, chunk: Chunk) -> None:
        """Send the children a part of the hoisted tensors."""
        for child in self._children:
            child.send(index, chunk)

    def replies(self) -> dict[Future[Message], Callable[[Message], list[Parcel | Missing]]]:
        """For each child the future reply, and a function that makes the workers' own replies from it."""
        return {child.reply: child.collect for child in self._children}

    def parcels(self) -> list[Parcel | Missing]:
        """Wait for the replies of all workers; raises the first error that comes."""
        children = {child.reply: child for child in self._children}
        found: dict[Future[Message], list[Parcel | Missing]] = {}
        for reply in as_completed(children):
            child = children[reply]
            try:
                found[reply] = child.collect(reply.result())
            except WorkerLostError as error:
                worker = child.branch.parcel.worker
                if not (self._mends and self._group.retries.is_loss(worker, error)):
                    raise
                found[reply] = [Missing(worker)]
        return [each for reply in children for each in found[reply]]


class _Child:
    def __init__(
        self,
        group: Group,
        branch: Branch,
        seconds: float,
        siblings: Siblings,
        options: ExecutionOptions | None,
        alone: bool,
    ) -> None:
        worker = branch.parcel.worker
        transport = group.transport.to(worker)
        self.branch = branch
        self.graph = RemoteGraph(group, worker, transport, seconds, options=options, siblings=siblings)
        self._alone = alone
        self._seconds = seconds
        self._anchor: Tensor | None = None
        self.reply: Future[Message] = Future()

    def start(
        self,
        hoisted: Sequence[Tensor],
        chunks: int,
        keep: bool,
        mends: bool,
        prepare: Callable[[Tensor], Tensor],
        instead: Mapping[int, Tensor],
    ) -> None:
        """Send all but the hoisted tensors."""
        graph, branch = self.graph, self.branch
        shapes = tuple(tuple(tensor.shape) for tensor in hoisted)
        relay = Relay(graph.key, keep, tuple(hoisted), shapes, chunks, self._seconds, branch, mends)
        with graph.span("pack") as span:
            message = pack(relay, main_by_name=True)
            span.made(message)
        connected = [instead.get(id(tensor), tensor) for tensor in message.tensors]
        self._anchor = graph.connect(message.with_tensors(connected), keep=keep)
        if chunks > 1:
            graph.streamed = range(sum(tensor.requires_grad for tensor in hoisted))
        sent = message.detached()
        sent.tensors = [
            tensor.new_empty(0) if number < len(hoisted) else prepare(tensor)
            for number, tensor in enumerate(message.tensors)
        ]
        with graph.span("send"):
            self.reply = self._send(sent)
        if graph.siblings.log is not None:
            graph.siblings.log.watch(message, self.reply)

    def _send(self, message: Message) -> Future[Message]:
        if not self._alone:
            return self.graph.send(message)
        spent = int(self.graph.transport.has_lost(self.graph.worker))
        return self.graph.ask(Sent.of(message, self.graph.key), spent=spent)

    def send(self, index: int, chunk: Chunk) -> None:
        """Send a part of the hoisted tensors; the reply fails if it does not arrive, as for a lack of memory."""
        graph = self.graph
        with graph.span("send"):
            message = pack(TakeChunk(graph.key, False, index, chunk), main_by_name=True).detached()
            sent = graph.send(message)
        sent.add_done_callback(partial(_check_taken, graph, self.reply))

    def collect(self, message: Message) -> list[Parcel | Missing]:
        """The replies of the workers on this branch, connected to what was sent."""
        return self.graph.collect(self._anchor, message)


@dataclass(frozen=True)
class Relay(Errand):
    """Run a share, and let the workers below run theirs.

    Attributes:
        hoisted: the tensors that come in chunks; they are the first tensors of the message, which has them empty.
        shapes: the shapes of these.
        chunks: the number of chunks.
        seconds: how long to wait for these, and how long a call of a child may take; 0: no limit.
        branch: the shares.
        mends: whether the caller sends again what lost workers were to forward.
    """

    hoisted: tuple[Tensor, ...]
    shapes: tuple[tuple[int, ...], ...]
    chunks: int
    seconds: float
    branch: Branch
    mends: bool

    def __reduce__(self) -> tuple[Callable[..., Relay], tuple[Any, ...]]:
        """Its fields, the tensors first, so that they have the first numbers."""
        return _relay, (
            self.hoisted,
            self.key,
            self.keep,
            self.shapes,
            self.chunks,
            self.seconds,
            self.branch,
            self.mends,
        )

    def values(self) -> list[Parcel | Missing]:
        """See :class:`Errand`."""
        group = answering_group()
        flat: list[Tensor] = []
        for leaf, shape in zip(self.hoisted, self.shapes, strict=True):
            leaf.data = torch.empty(shape, dtype=leaf.dtype, device=leaf.device)
            flat.append(leaf.data.view(-1))  # has a version counter of its own
        group.transport.about_to_wait()
        with group.streams.opened(self.key, self.chunks, self.seconds) as arriving:
            if group.has_gone(self.key):
                raise group.membership.loss_of(self.key[0])
            children = Children(
                group,
                self.branch.branches,
                self.hoisted,
                self.chunks,
                self.seconds,
                keep=self.keep,
                siblings=Siblings(error_of=PassedOnError),
                mends=self.mends,
            )
            for index, chunk in enumerate(arriving):
                children.hand_on(index, chunk)
                for number, start, values in chunk:
                    flat[number][start : start + len(values)].copy_(values)
        with group.running_shares.alone(self.branch.parcel.key, group.transport.about_to_wait):
            if self.mends and group.has_gone(self.key):  # these shares run elsewhere now
                raise group.membership.loss_of(self.key[0])
            own = self._run_own(group)
        return [own, *children.parcels()]

    def _run_own(self, group: Group) -> Parcel:
        parcel = self.branch.parcel
        message = parcel.message()
        # Messages that are sent are recorded by who sends them.
        here = Here(receiving_device(message.device), group, group.recorder.only("run", "backward"))
        graph = RemoteGraph(group, group.rank, here, 0, own=True)
        graph.key = parcel.key
        anchor = graph.connect(message, keep=self.keep)
        sent = message.detached()
        on_the_way = {which for other in self.branch.parcels()[1:] for which in other.sent()}
        on_the_way -= {id(tensor) for tensor in self.hoisted}  # of these the chunks are on the way
        for number, tensor in enumerate(parcel.tensors):
            if id(tensor) in on_the_way:
                sent.tensors[number] = tensor.detach().clone()
        reply = graph.connected(anchor, here.send(group.rank, sent, 0).result().received())
        return Parcel.of(parcel.worker, parcel.key, reply)


def _check_taken(graph: RemoteGraph, reply: Future[Message], sent: Future[Message]) -> None:
    error = sent.exception()
    if error is None:
        answer: Reply = unpack(sent.result())
        if answer.exception is None:
            return
        error = answer.exception.to_error(graph.worker_name)
    if isinstance(error, Exception):
        settle(reply, error)
        graph.release()


def _relay(hoisted: tuple[Tensor, ...], key: Key, keep: bool, *rest: Any) -> Relay:
    """Rebuild a relay from the values of its ``__reduce__``."""
    return Relay(key, keep, hoisted, *rest)
