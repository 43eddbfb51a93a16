"""A connection to rank 0's hub → one that is made again when it breaks, without losing or repeating a message.

A process that ends closes its connections, and that is told at once. A connection that is *reset* was perhaps cut by
something between the two, such as a firewall, so its worker connects again; both ends then send what the other has not
received.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import math
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from torchopt_dist.distributed.rendezvous.store import GroupEndedError
from torchopt_dist.process.liveness import Liveness

__all__ = [
    "DIED",
    "MAX_LINE",
    "OVER",
    "RESET",
    "STOPPED",
    "UNREACHABLE",
    "Link",
    "ToHub",
    "keep_alive",
    "read_line",
]

DIED, UNREACHABLE, STOPPED, RESET = "died", "unreachable", "stopped", "reset"
"""The causes of a loss, and how else a connection ends."""
OVER = "over"
"""Why the hub refuses a worker that is to replace a lost one: the others are at the end."""
MAX_LINE = 1 << 24
MAX_PROBES, MAX_SECONDS, MAX_MILLISECONDS = 127, 32767, 2**31 - 1
"""The most that Linux takes for TCP_KEEPCNT, for the times between probes, and for TCP_USER_TIMEOUT."""
NO_ANSWER = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)
DRAIN_SECONDS = 1.0
AGAIN_SECONDS = 0.05
"""Between two attempts to connect again."""

_Message: TypeAlias = dict[str, Any]


class Link:
    """One end of a connection that may be made several times.

    Attributes:
        received: the number of the last message that has come.
        writer: ``None`` while there is no connection.
        turn: how often the connection has been made.
    """

    def __init__(self) -> None:
        self.received = 0
        self.writer: asyncio.StreamWriter | None = None
        self.turn = 0
        self._number = 0
        self._kept: deque[tuple[int, _Message]] = deque()

    def attach(self, writer: asyncio.StreamWriter, received: int) -> None:
        """Continue over a new connection, whose other end has received so many messages."""
        self._forget(received)
        self.writer = writer
        self.turn += 1
        for number, message in self._kept:
            self._write(number, message)

    def put(self, message: _Message) -> None:
        """Send a message, now or when the connection has been made again."""
        self._number += 1
        self._kept.append((self._number, message))
        self._write(self._number, message)

    async def drain(self) -> None:
        """Wait until the messages are with the system; do not wait for a receiver that reads nothing."""
        if self.writer is not None and self.writer.transport.get_write_buffer_size():
            with contextlib.suppress(OSError):  # the end of a connection is told where it is read
                await asyncio.wait_for(self.writer.drain(), DRAIN_SECONDS)

    async def receive_all(
        self, reader: asyncio.StreamReader, handle: Callable[[_Message], Awaitable[None]]
    ) -> str:
        """Handle each message once, until the connection ends; returns how it ended."""
        while True:
            try:
                line = await reader.readline()
            except OSError as error:
                return UNREACHABLE if error.errno in NO_ANSWER else RESET
            except ValueError:  # a line that is longer than any of ours
                return DIED
            if not line.endswith(b"\n"):
                return DIED
            message = json.loads(line)
            number = message.pop("number")
            self._forget(message.pop("received"))
            if number > self.received:
                self.received = number
                await handle(message)

    def _write(self, number: int, message: _Message) -> None:
        if self.writer is not None:
            numbered = {**message, "number": number, "received": self.received}
            self.writer.write(json.dumps(numbered).encode() + b"\n")

    def _forget(self, received: int) -> None:
        while self._kept and self._kept[0][0] <= received:
            self._kept.popleft()


class ToHub:
    """A worker's end; ``ended`` is called with the cause when the connection has ended for good."""

    def __init__(
        self,
        rank: int,
        incarnation: int,
        liveness: Liveness,
        handle: Callable[[_Message], None],
        ended: Callable[[str], None],
    ) -> None:
        self.link = Link()
        self._who = {"rank": rank, "incarnation": incarnation}
        self._liveness = liveness
        self._handle = handle
        self._ended = ended
        self._listening: asyncio.Task[None] | None = None

    async def connect(self, host: str, port: int, token: str) -> None:
        """Connect for the first time; raises ``OSError`` if the hub cannot be reached."""
        self._where = (host, port, token)
        reader = await self._open()
        self._listening = asyncio.ensure_future(self._listen(reader))

    async def send(self, message: _Message) -> None:
        """Send a message; if the connection is broken just now, later."""
        self.link.put(message)
        await self.link.drain()

    async def close(self) -> None:
        """End the connection."""
        waits: list[Awaitable[None]] = []
        if self._listening is not None:
            self._listening.cancel()
            waits.append(self._listening)
        if self.link.writer is not None:
            self.link.writer.close()
            waits.append(self.link.writer.wait_closed())
        await asyncio.gather(*waits, return_exceptions=True)

    def where(self, hello: _Message) -> tuple[str, int, str]:
        """Host and port of the hub, and what a connection begins with that says this."""
        host, port, token = self._where
        return host, port, f"{token}\n{json.dumps({**self._who, **hello})}\n"

    async def _open(self) -> asyncio.StreamReader:
        host, port, token = self._where
        reader, writer = await asyncio.open_connection(host, port, limit=MAX_LINE)
        keep_alive(writer, self._liveness)
        hello = json.dumps({**self._who, "received": self.link.received})
        writer.write(f"{token}\n{hello}\n".encode())
        try:
            answer = await read_line(reader)
            refusal = answer.get("refused")
            if refusal is not None:
                raise GroupEndedError if refusal == OVER else ConnectionRefusedError(refusal)
        except BaseException:
            writer.close()
            raise
        self.link.attach(writer, answer["received"])
        return reader

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        async def handle(message: _Message) -> None:
            self._handle(message)

        while (cause := await self.link.receive_all(reader, handle)) == RESET:
            self.link.writer = None
            again = await self._open_again()
            if again is None:
                cause = DIED
                break
            reader = again
        self._ended(cause)

    async def _open_again(self) -> asyncio.StreamReader | None:
        """Connect again; returns ``None`` if the hub has ended."""
        deadline = time.monotonic() + self._liveness.patience
        while (left := deadline - time.monotonic()) > 0:
            try:
                return await asyncio.wait_for(self._open(), left)
            except (ConnectionRefusedError, TimeoutError):
                return None
            except OSError:
                await asyncio.sleep(AGAIN_SECONDS)
        return None


async def read_line(reader: asyncio.StreamReader) -> _Message:
    """A message at the beginning of a connection, which has no number; raises ``OSError`` if none came."""
    try:
        line = await reader.readline()
        message: _Message = json.loads(line)
    except ValueError:
        raise ConnectionResetError("the connection ended before it began") from None
    return message


def keep_alive(writer: asyncio.StreamWriter, liveness: Liveness) -> None:
    """Let the kernel probe the other machine's kernel, so that a network that stays cut ends the connection.

    The processes take no part in that, so one that computes for long is not taken for dead; what is sent while the
    network is cut arrives when it is back.
    """
    seconds = min(math.ceil(liveness.interval), MAX_SECONDS)
    options = (
        ("TCP_KEEPIDLE", seconds),
        ("TCP_KEEPINTVL", seconds),
        ("TCP_KEEPCNT", min(max(1, math.ceil(liveness.patience / seconds)), MAX_PROBES)),
        ("TCP_USER_TIMEOUT", min(math.ceil(1000 * liveness.patience), MAX_MILLISECONDS)),
    )
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in options:
        if hasattr(socket, option):  # not every system has all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
