"""Frames ⇄ a stream of bytes that never makes its user wait: what a ferry sends over.

A frame is a head (what it is, of which channel, pipe or file, how long) and its content.
"""

from __future__ import annotations

import collections
import os
import struct
import time
from dataclasses import dataclass
from enum import IntEnum, auto

__all__ = ["Frames", "Kind"]

HEAD = struct.Struct("!BQI")
"""Kind, number, length of the content."""
PIECE_SIZE = 1 << 18
ENOUGH = 1 << 20
"""Bytes that wait to be sent, above which no more should be added."""


class Kind(IntEnum):
    """What a frame is."""

    OPEN = auto()
    """A new channel is wanted; its content says of what."""
    MESSAGE = auto()
    """Of a channel: a message, and what came with it."""
    BYTES = auto()
    """Of a pipe: what was written."""
    PIECE = auto()
    """Of a file: its next bytes."""
    END = auto()
    """Of a channel or a pipe: there will be no more."""
    ALIVE = auto()
    """Nothing, but a sign of life."""


@dataclass(eq=False)
class _File:
    """What is left to send of a file. An empty one is sent as one empty piece."""

    number: int
    descriptor: int
    size: int
    offset: int = 0

    def next(self) -> bytes | None:
        if self.offset >= max(self.size, 1):
            return None
        content = os.pread(self.descriptor, PIECE_SIZE, self.offset)
        self.offset += PIECE_SIZE
        return HEAD.pack(Kind.PIECE, self.number, len(content)) + content


class Frames:
    """Both directions of a stream.

    Args:
        into: descriptor that bytes come from; :meth:`close` closes it.
        out: descriptor that bytes go to; may be the same one.
        early: bytes that have been read from ``into`` already.
    """

    def __init__(self, into: int, out: int, early: bytes) -> None:
        self.into, self.out = into, out
        self.spoke = time.monotonic()
        """When bytes were last sent."""
        self._outgoing: collections.deque[bytes | _File] = collections.deque()
        self._part: memoryview | None = None
        self._waiting = 0
        self._arrived = bytearray(early)
        for descriptor in (into, out):
            os.set_blocking(descriptor, False)

    @property
    def to_send(self) -> bool:
        """Whether something waits to be sent."""
        return self._part is not None or bool(self._outgoing)

    @property
    def full(self) -> bool:
        """Whether so much waits to be sent that nothing should be added."""
        return self._waiting > ENOUGH

    def put(self, kind: Kind, number: int, content: bytes = b"") -> None:
        """Have a frame sent, after those before it."""
        self._outgoing.append(HEAD.pack(kind, number, len(content)) + content)
        self._waiting += HEAD.size + len(content)

    def put_file(self, number: int, descriptor: int, size: int) -> None:
        """Have a file sent, and its descriptor closed. It is read when it is its turn."""
        self._outgoing.append(_File(number, descriptor, size))

    def send(self) -> None:
        """Send what can be sent now.

        Raises:
            OSError: nobody reads it any more.
        """
        while self._part is not None or self._take_next():
            assert self._part is not None
            try:
                written = os.write(self.out, self._part)
            except BlockingIOError:
                return
            self.spoke = time.monotonic()
            self._part = self._part[written:] if written < len(self._part) else None

    def _take_next(self) -> bool:
        while self._outgoing:
            first = self._outgoing[0]
            if isinstance(first, bytes):
                self._outgoing.popleft()
                self._waiting -= len(first)
                self._part = memoryview(first)
                return True
            piece = first.next()
            if piece is not None:
                self._part = memoryview(piece)
                return True
            os.close(first.descriptor)
            self._outgoing.popleft()
        return False

    def receive(self) -> None:
        """Take in what is there.

        Raises:
            EOFError: the other end has closed the stream.
            OSError: the stream broke.
        """
        try:
            data = os.read(self.into, PIECE_SIZE)
        except BlockingIOError:
            return
        if not data:
            raise EOFError
        self._arrived += data

    def next(self) -> tuple[Kind, int, bytes] | None:
        """Kind, number and content of the next frame that has arrived whole."""
        if len(self._arrived) < HEAD.size:
            return None
        kind, number, length = HEAD.unpack_from(self._arrived)
        end = HEAD.size + length
        if len(self._arrived) < end:
            return None
        content = bytes(self._arrived[HEAD.size : end])
        del self._arrived[:end]
        return Kind(kind), number, content

    def close(self) -> None:
        """Close the stream, and the files that have not been sent."""
        files = {waiting.descriptor for waiting in self._outgoing if isinstance(waiting, _File)}
        for descriptor in {self.into, self.out} | files:
            os.close(descriptor)
        self._outgoing.clear()
