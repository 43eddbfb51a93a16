"""Messages, each with a payload of bytes ⇄ frames on one byte stream, without blocking at either end.

A frame is the length of a pickled message, the length of the bytes that go with it, and these two. Launcher and agent
have one such stream, whatever it is made of: a Unix socket on one machine, a channel of SSH between two.
"""

from __future__ import annotations

import collections
import pickle
import select
import socket
import struct
import time
from typing import Any

__all__ = ["FrameReader", "Stream", "frame"]

HEAD = struct.Struct("!IQ")
CHUNK = 1 << 18
FULL = 1 << 17
"""Bytes that wait to be sent, above which no more should be put that can wait elsewhere."""

Buffer = bytes | bytearray | memoryview


def frame(message: object, payload: Buffer = b"") -> tuple[bytes, Buffer]:
    """The frame of a message: the bytes before the payload, and the payload.

    Args:
        message: one of the dataclasses of ``_messages.py``.
        payload: bytes that go with it, and are not copied into a pickle.
    """
    pickled = pickle.dumps(message)
    return HEAD.pack(len(pickled), len(payload)) + pickled, payload


class FrameReader:
    """Bytes, in pieces as they arrive → messages and their payloads."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: Buffer) -> list[tuple[Any, bytes]]:
        """Take some bytes; returns the messages that are complete with them."""
        self._data += data
        found = []
        while len(self._data) >= HEAD.size:
            pickled, payload = HEAD.unpack_from(self._data)
            middle, end = HEAD.size + pickled, HEAD.size + pickled + payload
            if len(self._data) < end:
                break
            with memoryview(self._data) as view:
                found.append((pickle.loads(view[HEAD.size : middle]), bytes(view[middle:end])))
            del self._data[:end]
        return found


class Stream:
    """One end of a byte stream.

    Args:
        end: a connected socket of any kind that carries bytes; the stream closes it.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end
        self._reader = FrameReader()
        self._to_send: collections.deque[memoryview] = collections.deque()
        self._size = 0

    def fileno(self) -> int:
        """The descriptor to watch."""
        return self._end.fileno()

    @property
    def waits_to_send(self) -> bool:
        """Whether a message has not been sent completely yet."""
        return bool(self._to_send)

    @property
    def is_full(self) -> bool:
        """Whether so much waits to be sent that nothing more should be put that can wait elsewhere."""
        return self._size > FULL

    @property
    def waits_to_be_read(self) -> bool:
        """Whether bytes, or the end of the stream, have arrived and have not been read yet."""
        return self._ready(select.POLLIN, 0.0)

    def put(self, message: object, payload: Buffer = b"") -> None:
        """Send a message as soon as the other end takes it.

        Raises:
            OSError: the other end is gone.
        """
        for part in frame(message, payload):
            if len(part):
                self._to_send.append(memoryview(part))
                self._size += len(part)
        self.send()

    def send(self) -> None:
        """Send what the other end takes now.

        Raises:
            OSError: the other end is gone.
        """
        while self._to_send:
            part = self._to_send[0]
            try:
                sent = self._end.send(part[:CHUNK])
            except BlockingIOError:
                return
            self._size -= sent
            if sent == len(part):
                self._to_send.popleft()
            else:
                self._to_send[0] = part[sent:]

    def send_all(self, seconds: float) -> None:
        """Send all that waits, if the other end takes it in time.

        Raises:
            OSError: the other end is gone.
        """
        until = time.monotonic() + seconds
        while self._to_send and (left := until - time.monotonic()) > 0:
            if self._ready(select.POLLOUT, left):
                self.send()

    def receive(self) -> list[tuple[Any, bytes]] | None:
        """The messages and payloads that are complete with the bytes that have arrived; ``None`` if none have arrived.

        Raises:
            EOFError: the other end is gone.
        """
        try:
            data = self._end.recv(CHUNK)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        if not data:
            raise EOFError
        return self._reader.feed(data)

    def close(self) -> None:
        """Close this end."""
        self._end.close()

    def _ready(self, event: int, seconds: float) -> bool:
        poll = select.poll()  # not `select`, which knows the first 1024 descriptors only
        poll.register(self._end, event)
        return bool(poll.poll(seconds * 1000))
