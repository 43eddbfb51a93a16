"""Rank 0's side of the membership: messages of all workers → what follows from them, to all, rank 0 included."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import json
import logging
import math
import secrets
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from torchopt_dist._liveness import Liveness

__all__ = ["DIED", "HUB", "JOIN_SECONDS", "MAX_LINE", "START", "Hub", "keep_alive", "receive_all", "write"]

log = logging.getLogger(__name__)

HUB = 0
START = "start"
"""The purpose of the first barrier, which waits for the dead, too: without all ranks there is no group."""
DIED = "died"
JOIN_SECONDS = 10.0
DRAIN_SECONDS = 1.0
MAX_LINE = 1 << 24
MAX_PROBES = 127
"""The most that Linux takes for TCP_KEEPCNT."""
NO_ANSWER = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)


class Hub:
    """The hub of a membership.

    Args:
        world_size: the number of workers.
        skips_dead: whether barriers are opened without the ranks that have died.
        liveness: when a connection without an answer ends.
        to_self: takes the messages to rank 0.
    """

    def __init__(
        self,
        world_size: int,
        skips_dead: bool,
        liveness: Liveness,
        to_self: Callable[[dict[str, Any]], None],
    ) -> None:
        self.token = secrets.token_hex(16)
        self.world_size = world_size
        self._skips_dead = skips_dead
        self._liveness = liveness
        self._to_self = to_self
        self._members: dict[int, dict[str, Any]] = {}
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._connections: set[asyncio.Task[None]] = set()
        self._arrived: dict[str, set[int]] = {}
        self._groups: dict[str, Sequence[int]] = {}
        self._dead: set[int] = set()

    async def listen(self, host: str) -> int:
        """Accept connections at that address; returns the port."""
        self._server = await asyncio.start_server(self._accept, host, 0, limit=MAX_LINE, backlog=1024)
        return int(self._server.sockets[0].getsockname()[1])

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rank = None
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)

        async def handle(message: dict[str, Any]) -> None:
            nonlocal rank
            if "join" in message:
                rank = int(message["join"]["rank"])
            await self.handle(message, writer)

        try:
            if not await self._knows_token(reader):
                log.warning(
                    "the membership hub refused a connection without the token from %s",
                    writer.get_extra_info("peername"),
                )
                return
            keep_alive(writer, self._liveness)
            cause = await receive_all(reader, handle)
            if rank in self._writers:  # the connection ended, and it did not say that it left
                await self.handle({"failed": rank, "report": "", "cause": cause}, None)
        except asyncio.CancelledError:
            pass  # this rank is leaving
        finally:
            writer.close()
            with contextlib.suppress(OSError, asyncio.CancelledError):  # nothing is left to be cancelled
                await writer.wait_closed()
            self._connections.discard(task)

    async def _knows_token(self, reader: asyncio.StreamReader) -> bool:
        try:
            token = await asyncio.wait_for(reader.readline(), JOIN_SECONDS)
        except (TimeoutError, ValueError, OSError):  # silence, an endless line, a hang-up
            return False
        return hmac.compare_digest(token.strip(), self.token.encode())

    async def handle(self, message: dict[str, Any], writer: asyncio.StreamWriter | None) -> None:
        """Do what follows from a message; ``writer`` answers it, if another rank has sent it."""
        if "join" in message:
            rank = message["join"]["rank"]
            self._members[rank] = message["join"]
            if writer is not None:
                self._writers[rank] = writer
            if len(self._members) == self.world_size:
                await self._broadcast({"members": [self._members[r] for r in range(self.world_size)]})
        elif "arrive" in message:
            key = message["arrive"]
            self._arrived.setdefault(key, set()).add(message["rank"])
            self._groups[key] = message["group"]
            await self._open(key)
        elif "left" in message and message["left"] != HUB:
            self._writers.pop(message["left"], None)
        elif message.get("failed") not in self._dead:
            if "failed" in message:
                self._dead.add(message["failed"])
                self._writers.pop(message["failed"], None)
            await self._broadcast(message)
            for key in tuple(self._arrived):
                await self._open(key)

    async def _open(self, key: str) -> None:
        """Release who waits at a barrier, if all have come."""
        skipped = self._dead if self._skips_dead and not key.startswith(f"{START}:") else set()
        if self._arrived[key] | skipped >= set(self._groups[key]):
            del self._arrived[key]
            await self._broadcast({"release": key}, self._groups.pop(key))

    async def _broadcast(self, message: dict[str, Any], ranks: Sequence[int] | None = None) -> None:
        writers = [writer for rank, writer in self._writers.items() if ranks is None or rank in ranks]
        for writer in writers:
            writer.write(_line(message))
        for writer in writers:
            if writer.transport.get_write_buffer_size():
                # The end of a connection is reported where it is read; who reads nothing must not hold up the others.
                with contextlib.suppress(OSError):
                    await asyncio.wait_for(writer.drain(), DRAIN_SECONDS)
        if ranks is None or HUB in ranks:
            self._to_self(message)

    async def close(self) -> None:
        """End the connections."""
        self._server.close()
        for writer in self._writers.values():
            writer.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)


def keep_alive(writer: asyncio.StreamWriter, liveness: Liveness) -> None:
    """Let the kernel probe the other machine's kernel, so that a network that stays cut ends the connection.

    The two processes take no part in that, so a worker that computes for long is not taken for a dead one. What is sent
    while the network is cut arrives when it is back.
    """
    seconds = math.ceil(liveness.interval)
    options = (
        ("TCP_KEEPIDLE", seconds),
        ("TCP_KEEPINTVL", seconds),
        ("TCP_KEEPCNT", min(max(1, math.ceil(liveness.patience / seconds)), MAX_PROBES)),
        ("TCP_USER_TIMEOUT", math.ceil(1000 * liveness.patience)),  # milliseconds
    )
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in options:
        if hasattr(socket, option):  # not every system has all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


async def write(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    """Send a message."""
    writer.write(_line(message))
    await writer.drain()


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


async def receive_all(
    reader: asyncio.StreamReader, handle: Callable[[dict[str, Any]], Awaitable[None]]
) -> str:
    """Handle the messages on a connection until it ends; returns what that says of the other end, as a cause."""
    while True:
        try:
            line = await reader.readline()
        except OSError as error:
            return "unreachable" if error.errno in NO_ANSWER else DIED
        except ValueError:  # a line that is longer than any of ours
            return DIED
        if not line.endswith(b"\n"):
            return DIED
        await handle(json.loads(line))
