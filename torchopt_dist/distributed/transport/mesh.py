"""Frames for another worker → the same frames there, each message once and in order, over ZeroMQ.

Each worker listens with one PULL socket and opens, for its first message to another worker, a PUSH socket to that
worker. Any thread sends, and one thread at a time receives.

ZeroMQ connects again after a broken connection, but messages on the way are lost. So messages are numbered, kept until
the receiver has confirmed them, and sent again if one is missing: a receiver that gets number 7 after number 5 asks for
number 6. A sender that gets no confirmation for a second asks which messages the receiver has.

Large frames go in pieces. To a process of the same machine they are lent (``lent_memory.py``). A receiver that cannot
read them asks for all that it has not confirmed, in frames of bytes, and so gets everything from then on.
"""

from __future__ import annotations

import contextlib
import logging
import struct
import threading
from collections import deque
from collections.abc import Sequence
from typing import TypeAlias

import zmq

from torchopt_dist.distributed.serialization.frames import Frame, in_pieces, joined
from torchopt_dist.distributed.transport import lent_memory
from torchopt_dist.distributed.transport.contacts import Contact, Endpoint, configure

__all__ = ["Mesh", "Received"]

log = logging.getLogger(__name__)

DATA, PROBE, TOLD, AGAIN, LOAN, UNREADABLE = range(6)
_HEADER = struct.Struct("<BIHQQ")
"""What it is; the sender's rank and incarnation; the message's number, or of a probe the last one's; the last number
received."""

Received: TypeAlias = tuple[int, bytes, "list[Frame] | MemoryError"]
"""The sender's rank, the first frame, and the other ones, or that there is no room for them."""


class _Link:
    """The messages to and from one process of a worker."""

    def __init__(self, contact: Contact, incarnation: int) -> None:
        self.contact = contact
        self.incarnation = incarnation
        self.lock = threading.Lock()
        self.socket: zmq.Socket[bytes] | None = None
        self.number = 0
        self.kept: deque[tuple[int, Sequence[Frame]]] = deque()
        self.probed = 0
        self.received = 0
        self.asked_for = 0
        self.closed = False
        self.lends = False
        self.token = lent_memory.new_token()


class Mesh:
    """This worker's connections to all the others, whose contacts and incarnations are given by rank."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        here: Endpoint,
        contacts: Sequence[Contact],
        incarnations: Sequence[int] = (),
    ) -> None:
        self._context = context
        self._here = here
        self._links = [
            self._link(*each) for each in zip(contacts, incarnations or [0] * len(contacts), strict=True)
        ]

    def incarnation(self, rank: int) -> int:
        """The incarnation of the process to which messages for a worker are sent."""
        return self._links[rank].incarnation if rank < len(self._links) else 0

    def send(self, rank: int, frames: Sequence[Frame], incarnation: int | None = None) -> bool:
        """Send a message to this incarnation, or the present one; returns ``False`` if that process has ended.

        The memory of its frames must not change before an answer to the message has come.
        """
        link = self._links[rank]
        with link.lock:
            if link.closed or incarnation not in (None, link.incarnation):
                return False
            link.number += 1
            link.kept.append((link.number, frames))
            self._put(link, DATA, link.number, frames)
        return True

    def receive(self) -> Received | None:
        """Wait for the next message; ``None`` when the context has been ended. One thread at a time may call it."""
        while True:
            try:
                first, *rest = self._here.socket.recv_multipart(copy=False)
            except zmq.ContextTerminated:
                return None
            head = first.bytes
            if len(head) < _HEADER.size:
                continue
            kind, rank, incarnation, number, told = _HEADER.unpack_from(head)
            if rank >= len(self._links):
                continue
            link = self._links[rank]
            if link.incarnation != incarnation:
                continue
            frames: list[Frame] | MemoryError | None
            try:
                if kind == LOAN:
                    kind, frames = DATA, self._read(link, number, rest[0].buffer)
                else:
                    frames = _joined(rest)
                is_next = frames is not None and self._take(link, kind, number, told)
            except (OSError, zmq.ZMQError):  # no descriptor for an answer, say: the other end probes again
                log.debug("worker %d gets no answer now", rank, exc_info=True)
                continue
            if is_next and frames is not None:
                return rank, head[_HEADER.size :], frames

    def probe(self) -> None:
        """Ask workers that have not confirmed all messages since the last probe."""
        for link in tuple(self._links):
            if not link.kept:
                continue
            with link.lock:
                if link.kept and link.kept[0][0] <= link.probed:
                    self._put(link, PROBE, link.number)
                link.probed = link.number

    def close(self, rank: int) -> None:
        """Send nothing more to a worker, and drop the messages that it has not received."""
        if rank >= len(self._links):
            return  # nobody has been met yet
        link = self._links[rank]
        with link.lock:
            link.closed = True
            lent_memory.erase(link.token)
            link.kept.clear()
            if link.socket is not None:
                link.socket.close(linger=0)

    def forget(self, rank: int) -> None:
        """Close the link to a worker that has died, and remove the socket that it has left behind."""
        self.close(rank)
        for link in self._links[rank : rank + 1]:
            self._here.remove_of(link.contact)

    def reopen(self, rank: int, incarnation: int, contact: Contact) -> None:
        """Send to a new process of a worker, and take messages of no other one."""
        self.close(rank)
        self._here.admit(contact)
        self._links[rank] = self._link(contact, incarnation)

    def close_all(self) -> None:
        """Send nothing more to any worker."""
        for rank in range(len(self._links)):
            self.close(rank)

    def _link(self, contact: Contact, incarnation: int) -> _Link:
        link = _Link(contact, incarnation)
        link.lends = self._here.is_near(contact) and lent_memory.can_lend()
        return link

    def _read(self, link: _Link, number: int, loan: Frame) -> list[Frame] | MemoryError | None:
        """What is lent with a message, if that comes next; ``None`` if it has been asked for in frames of bytes."""
        if number != link.received + 1:
            return []
        try:
            return lent_memory.read(loan)
        except MemoryError as error:
            return error
        except OSError as error:
            log.debug("what is lent cannot be read: %s", error)
        with link.lock:
            link.asked_for = number
            self._put(link, UNREADABLE, 0)
        return None

    def _put(self, link: _Link, kind: int, number: int, frames: Sequence[Frame] = (b"",)) -> None:
        if link.closed:
            return
        if link.socket is None:
            link.socket = self._context.socket(zmq.PUSH)
            configure(link.socket)
            self._here.connect(link.socket, link.contact)
        first, *rest = frames
        if kind == DATA and link.lends and sum(map(len, rest)) >= lent_memory.LARGE:
            kind, rest = LOAN, [lent_memory.lend(rest, link.token)]
        header = _HEADER.pack(kind, self._here.rank, self._here.incarnation, number, link.received)
        with contextlib.suppress(zmq.ContextTerminated):
            if rest:
                link.socket.send_multipart([header + first, *in_pieces(rest)], copy=False)
            else:
                link.socket.send(header + first)

    def _take(self, link: _Link, kind: int, number: int, told: int) -> bool:
        """Whether it is the message that comes next."""
        with link.lock:
            while link.kept and link.kept[0][0] <= told:
                link.kept.popleft()
            if kind == DATA and number == link.received + 1:
                link.received = number
                return True
            if kind in (AGAIN, UNREADABLE):
                link.lends = link.lends and kind == AGAIN
                for kept, frames in link.kept:
                    self._put(link, DATA, kept, frames)
            elif kind == PROBE and number <= link.received:
                self._put(link, TOLD, 0)
            elif kind == PROBE or (
                kind == DATA and number > link.received and link.asked_for <= link.received
            ):
                link.asked_for = link.received + 1
                self._put(link, AGAIN, 0)
            return False


def _joined(pieces: Sequence[zmq.Frame]) -> list[Frame] | MemoryError:
    try:
        return joined(piece.buffer for piece in pieces)
    except MemoryError as error:
        return error
