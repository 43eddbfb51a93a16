"""A share and those of the workers below in the tree → on a worker: forward the others, run its own, reply with all.

Such a request is a call of calls, as if a function had called the workers below: the worker's graph leads from the
tensors that it received through its own share, and through the *dispatch* and *collect* of each child. So tensors that
shares have in common are sent to a child once, their gradients are summed on the way back, and derivatives of every
order are exact, as with nested calls. The shares and results of other workers are forwarded as messages, without being
rebuilt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchopt_dist._serialized_exception import PassedOnError
from torchopt_dist.distributed._chunks import send_chunk
from torchopt_dist.distributed._device_placement import receiving_device
from torchopt_dist.distributed._group import Group, answering_group
from torchopt_dist.distributed._here import Inside
from torchopt_dist.distributed._message import Message
from torchopt_dist.distributed._nodes import HERE
from torchopt_dist.distributed._protocol import Errand, Key
from torchopt_dist.distributed._remote_graph import RemoteGraph
from torchopt_dist.distributed._serialization import pack
from torchopt_dist.distributed._siblings import Siblings
from torchopt_dist.distributed._streams import Chunk

__all__ = ["Branch", "Children", "Parcel"]


class Parcel(NamedTuple):
    """A message inside another one.

    Attributes:
        worker: the rank of the worker to which, or from which, it is sent.
        key: the key of the call.
        skeleton: as in the message; so are ``holes`` and ``device``.
        tensors: the tensors of the message, which the other message has, too.
        structures: the structures of the message, by digest; in a request the structures themselves are in the other
            message.
    """

    worker: int
    key: Key
    skeleton: bytes
    tensors: tuple[Tensor, ...]
    structures: dict[bytes, bytes]
    holes: tuple[tuple[int, int], ...]
    device: str | None

    @classmethod
    def of(cls, worker: int, key: Key, message: Message, structures: dict[bytes, bytes]) -> Parcel:
        """The parcel of a message."""
        return cls(
            worker, key, message.skeleton, tuple(message.tensors), structures, message.holes, message.device
        )

    def message(self, structures: Mapping[bytes, bytes]) -> Message:
        """The message again."""
        return Message(
            self.skeleton,
            list(self.tensors),
            [tensor.requires_grad for tensor in self.tensors],
            [isinstance(tensor, nn.Parameter) for tensor in self.tensors],
            {digest: structures[digest] for digest in self.structures},
            holes=self.holes,
            device=self.device,
        )


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
        structures: the structures of the modules in these, by digest.
        hoisted: tensors of all shares, which go to the children in chunks.
        chunks: how many chunks there are.
        seconds: how long a call may take; 0: for ever.
        keep: whether to keep graphs.
        siblings: the shares of these calls.
        prepare: a function from a tensor to the one to send.
    """

    def __init__(
        self,
        group: Group,
        branches: Sequence[Branch],
        structures: Mapping[bytes, bytes],
        hoisted: Sequence[Tensor],
        chunks: int,
        seconds: float,
        *,
        keep: bool,
        siblings: Siblings,
        prepare: Callable[[Tensor], Tensor] = Tensor.detach,
    ) -> None:
        self._group = group
        self._children = [_Child(group, branch, seconds, siblings) for branch in branches]
        for child in self._children:
            child.start(structures, hoisted, chunks, keep, prepare)

    def hand_on(self, chunk: Chunk) -> None:
        """Send the children a part of the hoisted tensors."""
        for child in self._children:
            child.send(chunk)

    def replies(self) -> dict[Future[Message], Callable[[Message], list[Parcel]]]:
        """For each child the future reply, and a function that makes the workers' own replies from it."""
        return {child.reply: child.collect for child in self._children}

    def parcels(self) -> list[Parcel]:
        """Wait for the replies of all workers; raises the first error that comes."""
        replies, found = self.replies(), {}
        for reply in as_completed(replies):
            found[reply] = replies[reply](reply.result())
        return [parcel for reply in replies for parcel in found[reply]]


class _Child:
    def __init__(self, group: Group, branch: Branch, seconds: float, siblings: Siblings) -> None:
        self._transport = group.transport.to(branch.parcel.worker)
        self._branch = branch
        self._seconds = seconds
        self._graph = RemoteGraph(group, branch.parcel.worker, self._transport, seconds, siblings=siblings)
        self._anchor: Tensor | None = None
        self.reply: Future[Message] = Future()

    def start(
        self,
        structures: Mapping[bytes, bytes],
        hoisted: Sequence[Tensor],
        chunks: int,
        keep: bool,
        prepare: Callable[[Tensor], Tensor],
    ) -> None:
        """Send all but the hoisted tensors."""
        graph, branch = self._graph, self._branch
        shapes = tuple(tuple(tensor.shape) for tensor in hoisted)
        relay = Relay(graph.key, keep, tuple(hoisted), shapes, chunks, self._seconds, branch)
        with graph.span("pack") as span:
            message = span.made(pack(relay, main_by_name=True))
        message.structures = {
            digest: structures[digest] for parcel in branch.parcels() for digest in parcel.structures
        }
        self._anchor = graph.connect(message, keep=keep)
        if chunks > 1:
            graph.streamed = range(sum(tensor.requires_grad for tensor in hoisted))
        sent = message.detached()
        sent.tensors = [
            tensor.new_empty(0) if number < len(hoisted) else prepare(tensor)
            for number, tensor in enumerate(sent.tensors)
        ]
        with graph.span("send"):
            self.reply = self._transport.send(graph.worker, sent, self._seconds)
        if graph.siblings.log is not None:
            graph.siblings.log.watch(message, self.reply)

    def send(self, chunk: Chunk) -> None:
        """Send a part of the hoisted tensors."""
        send_chunk(self._graph, chunk, self.reply)

    def collect(self, message: Message) -> list[Parcel]:
        """The replies of the workers on this branch, connected to what was sent."""
        return self._graph.collect(self._anchor, message)


@dataclass(frozen=True)
class Relay(Errand):
    """Run a share, and let the workers below run theirs.

    Attributes:
        hoisted: the tensors that come in chunks; they are the first tensors of the message, which has them empty.
        shapes: the shapes of these.
        chunks: the number of chunks.
        seconds: how long to wait for these, and how long a call of a child may take; 0: no limit.
        branch: the shares.
    """

    hoisted: tuple[Tensor, ...]
    shapes: tuple[tuple[int, ...], ...]
    chunks: int
    seconds: float
    branch: Branch

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
        )

    def run(self, request: Message) -> list[Parcel]:
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
                request.structures,
                self.hoisted,
                self.chunks,
                self.seconds,
                keep=self.keep,
                siblings=Siblings(error_of=PassedOnError),
            )
            for chunk in arriving:
                children.hand_on(chunk)
                for number, start, values in chunk:
                    flat[number][start : start + len(values)].copy_(values)
        return [self._run_own(group, request.structures), *children.parcels()]

    def _run_own(self, group: Group, structures: Mapping[bytes, bytes]) -> Parcel:
        """Run the share of this worker."""
        parcel = self.branch.parcel
        message = parcel.message(structures)
        here = Inside(receiving_device(message.device), group)
        graph = RemoteGraph(group, group.rank, here, 0, turn=HERE)
        graph.key = parcel.key
        anchor = graph.connect(message, keep=self.keep)
        sent = message.detached()
        on_the_way = {id(tensor) for other in self.branch.parcels()[1:] for tensor in other.tensors}
        on_the_way -= {id(tensor) for tensor in self.hoisted}  # of these the chunks are on the way
        for number, tensor in enumerate(parcel.tensors):
            if id(tensor) in on_the_way:
                sent.tensors[number] = tensor.detach().clone()
        reply = graph.connected(anchor, here.send(group.rank, sent, 0).result().received())
        return Parcel.of(group.rank, parcel.key, reply, reply.structures)


def _relay(hoisted: tuple[Tensor, ...], key: Key, keep: bool, *rest: Any) -> Relay:
    """Rebuild a relay from the values of its ``__reduce__``."""
    return Relay(key, keep, hoisted, *rest)
