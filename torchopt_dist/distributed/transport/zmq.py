"""ZeroMQ: a request is a message over a mesh of connections, and so is its reply. torch's RPC is not started."""

from __future__ import annotations

import itertools
import logging
import os
import struct
import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist
import zmq

from torchopt_dist.distributed.membership.members import Failure
from torchopt_dist.distributed.messages.message import Message
from torchopt_dist.distributed.rendezvous.sealed_store import SealedStore
from torchopt_dist.distributed.serialization.frames import Frame, from_frames, to_frames
from torchopt_dist.distributed.serialization.pickling import error_reply
from torchopt_dist.distributed.serialization.wire import (
    from_wire,
    is_skeleton,
    to_wire,
)
from torchopt_dist.distributed.transport.base import Host, Sender, Transport
from torchopt_dist.distributed.transport.contacts import Endpoint, contact_of
from torchopt_dist.distributed.transport.mesh import Mesh, Received
from torchopt_dist.distributed.transport.pending import Alarms, disconnected, late
from torchopt_dist.distributed.transport.receiver import Receiver
from torchopt_dist.errors import InitializationError, SerializationError, WorkerLostError
from torchopt_dist.process.future import Future
from torchopt_dist.torch_private import init_distributed_autograd

__all__ = ["ZMQTransport"]

log = logging.getLogger(__name__)

REQUEST, REPLY = range(2)
SKELETON_ALONE = b"\0"
"""Begins a message without tensors; a pickle begins with 0x80."""
_ENVELOPE = struct.Struct("<BQ")
"""What it is, and the number of the request."""

PROBE_SECONDS = 1.0
END_SECONDS = 1.0
"""How long the end of the connections is waited for."""


class _Asked(NamedTuple):
    """A request that waits for its reply."""

    future: Future[Message]
    worker: int
    function: str


class _ToProcess:
    """Sends to the present processes of workers, and never to processes that replace them."""

    def __init__(self, transport: ZMQTransport, incarnation: int) -> None:
        self._transport = transport
        self._incarnation = incarnation

    def send(self, worker: int, request: Message, timeout: float) -> Future[Message]:
        """See :class:`~torchopt_dist.distributed.transport.base.Sender`."""
        return self._transport.send(worker, request, timeout, self._incarnation)

    def has_lost(self, worker: int) -> bool:
        """See :class:`~torchopt_dist.distributed.transport.base.Sender`."""
        return self._transport.loss(worker, self._incarnation) is not None


class ZMQTransport(Transport):
    """Sends requests over ZeroMQ, and answers those that arrive so."""

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self._numbers = itertools.count(host.first_number)
        self._asked: dict[int, _Asked] = {}
        self._alarms = Alarms(lambda number: number not in self._asked)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._here = Endpoint(host.rank, host.incarnation)
        self._store: SealedStore | None = None
        self._reopening = threading.Lock()
        self._mesh = Mesh(self._context, self._here, ())
        self._receiver: Receiver[Received] | None = None

    def start(self, store: SealedStore, timeout: float) -> None:
        """See :class:`~torchopt_dist.distributed.transport.base.Transport`; the time-out is the store's own."""
        membership = self._host.membership
        size, replaces = len(self._host.names), self._host.on_loss == "replace"
        incarnations = [member.incarnation for member in membership.members]
        host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        init_distributed_autograd(self._host.rank)
        if size == 1:
            return  # nobody to speak with, so nothing listens
        self._here.open(self._context)
        try:
            contacts = (
                self._here.meet_late(store, incarnations, host)
                if membership.joins_late
                else self._here.meet(store, size, host)
            )
        except (dist.DistError, OSError, zmq.ZMQError) as error:
            self._here.close()
            self._here.remove_folder()
            raise InitializationError(
                f"rank {self._host.rank} of {size} cannot exchange addresses with the others: {error}"
            ) from error
        self._mesh = Mesh(self._context, self._here, contacts, incarnations)
        self._store = store if replaces else None
        for member in membership.members:  # some may have come meanwhile
            self.worker_replaced(member.rank, member.incarnation)
        self._receiver = Receiver(self._mesh.receive, self._take, self._host.threads, self._here.close)
        self._receiver.start()
        self._probe_again()
        if membership.joins_late:
            membership.announce(timeout)

    def stop(self, *, in_order: bool, code: int | None = None) -> None:
        """See :class:`~torchopt_dist.distributed.transport.base.Transport`; nothing here keeps the interpreter."""
        del in_order, code
        self._alarms.close()
        self._mesh.close_all()
        self._here.remove_folder()  # here, as the process may end before the thread that receives does
        self._pending.fail_all(WorkerLostError("the group has ended before this worker has had an answer"))
        end = threading.Thread(target=self._context.term, daemon=True)
        end.start()
        end.join(END_SECONDS)

    def send(
        self, worker: int, request: Message, timeout: float, incarnation: int | None = None
    ) -> Future[Message]:
        """See :class:`~torchopt_dist.distributed.transport.base.Sender`; no ``incarnation`` means the present one."""
        self.about_to_wait()  # for the reply
        frames = _frames(request)  # an error here, such as a lack of memory, leaves nothing to wait for
        future = self._pending.add(worker)
        self._host.membership.watch(worker)
        present = self._mesh.incarnation(worker)
        incarnation = present if incarnation is None else incarnation
        failure = self.loss(worker, incarnation)
        if failure is not None:
            future.set_exception(failure.error())
            return future
        number = next(self._numbers)
        self._asked[number] = _Asked(future, worker, request.function)
        future.add_done_callback(lambda _: self._asked.pop(number, None))
        if timeout:
            self._alarms.set(timeout, number, lambda: self._late(number, timeout))
        try:
            broken = "" if self._send(worker, REQUEST, number, frames, incarnation) else "it was closed"
            failure = self.loss(worker, incarnation) if broken else None
        except (OSError, zmq.ZMQError) as error:
            broken = str(error) or type(error).__name__
        if broken:  # after the block, whose exception has nothing to do with what this raises elsewhere
            lost = disconnected(self._host.members[worker], broken)
            future.set_exception(lost if failure is None else failure.error())
        return future

    def loss(self, worker: int, incarnation: int) -> Failure | None:
        """How a process of a worker was lost, or has failed; ``None`` if it has not."""
        membership = self._host.membership
        failure = membership.failures.get(worker)
        if failure is None and incarnation != self._mesh.incarnation(worker):
            failure = membership.replaced.get(worker)
        return failure

    def to(self, worker: int) -> Sender:
        """See :class:`~torchopt_dist.distributed.transport.base.Transport`."""
        return self if self._store is None else _ToProcess(self, self._mesh.incarnation(worker))

    def worker_replaced(self, worker: int, incarnation: int) -> None:
        """See :class:`~torchopt_dist.distributed.transport.base.Transport`."""
        with self._reopening:
            if self._store is None or incarnation <= self._mesh.incarnation(worker):
                return  # it has yet to look where others listen, or has done so already
            try:
                self._mesh.reopen(worker, incarnation, contact_of(self._store, worker, incarnation))
            except (dist.DistError, InitializationError):  # calls to it fail
                name = self._host.names[worker]
                log.warning("%s has a new process that cannot be found", name, exc_info=True)

    def worker_lost(self, worker: int, error: Exception) -> None:
        """See :class:`~torchopt_dist.distributed.transport.base.Transport`."""
        if worker in self._host.lost:
            self._mesh.forget(worker)
        if worker == self._host.rank:  # this process may end at any moment, without `stop`
            self._here.remove_folder()
        super().worker_lost(worker, error)

    def about_to_wait(self) -> None:
        """See :class:`~torchopt_dist.distributed.transport.base.Transport`."""
        if self._receiver is not None:
            self._receiver.about_to_wait()

    def _late(self, number: int, timeout: float) -> None:
        """Give up a request. It is found by its number: its alarm must not keep its reply and the graph alive."""
        asked = self._asked.get(number)
        if asked is not None:
            name = self._host.names[asked.worker]
            asked.future.set_exception(late(asked.function, name, timeout))

    def _send(
        self, worker: int, kind: int, number: int, frames: Sequence[Frame], incarnation: int | None = None
    ) -> bool:
        first, *rest = frames
        return self._mesh.send(worker, [_ENVELOPE.pack(kind, number) + first, *rest], incarnation)

    def _take(self, received: Received) -> None:
        """Handle a message."""
        worker, first, rest = received
        kind, number = _ENVELOPE.unpack_from(first)
        content = first[_ENVELOPE.size :]
        if kind == REQUEST:
            self._answer(worker, number, content, rest)
        elif number in self._asked:  # otherwise nobody waits for it any more
            self._take_reply(number, content, rest)

    def _take_reply(self, number: int, content: bytes, rest: Sequence[Frame] | MemoryError) -> None:
        asked = self._asked[number]
        try:
            asked.future.set_result(_message(content, rest))
        except Exception as error:  # of this process, such as a lack of memory: the connection is whole
            asked.future.set_exception(error)

    def _answer(self, worker: int, number: int, content: bytes, rest: Sequence[Frame] | MemoryError) -> None:
        try:
            reply = self._host.answer(_message(content, rest))
            frames = _frames(reply)
        except BaseException as error:  # whatever was raised, the caller waits for an answer
            frames = _frames(error_reply(error))
        try:
            # The graph that the reply has used up is freed only after this.
            self._send(worker, REPLY, number, frames)
        except (OSError, zmq.ZMQError):
            log.debug("%s is gone, and gets no answer", self._host.names[worker], exc_info=True)

    def _probe_again(self) -> None:
        self._alarms.set(PROBE_SECONDS, None, self._probe_again)  # first, since there may be no descriptor
        self._mesh.probe()


def _frames(message: Message) -> list[Frame]:
    """The frames of a message; raises ``SerializationError`` if it mentions a reference of torch's RPC."""
    if message.references:
        raise SerializationError("an RRef can be sent by torch's RPC only: ask for the transport 'rpc'")
    if is_skeleton(message):
        return [SKELETON_ALONE + message.skeleton]
    return to_frames(to_wire(message, whole_storages=False))


def _message(content: bytes, rest: Sequence[Frame] | MemoryError) -> Message:
    """The inverse of :func:`_frames`; raises the ``MemoryError`` of frames for which there is no room."""
    if isinstance(rest, MemoryError):
        raise rest
    if content[:1] == SKELETON_ALONE:
        return Message(content[1:], [], [], [])
    return from_wire(from_frames(content, rest))
