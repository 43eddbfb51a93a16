"""Rank 0's side of the membership: messages of all workers → what follows from them, to all, rank 0 included."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from torchopt_dist._liveness import Liveness
from torchopt_dist.distributed._membership_link import (
    DIED,
    MAX_LINE,
    RESET,
    STOPPED,
    Link,
    keep_alive,
    read_line,
)
from torchopt_dist.distributed._stopped import is_running, process_table
from torchopt_dist.distributed._watchdog import is_heard

__all__ = ["HUB", "JOIN_SECONDS", "START", "Hub"]

log = logging.getLogger(__name__)

HUB = 0
START = "start"
"""The purpose of the first barrier, which waits for the dead, too: without all ranks there is no group."""
JOIN_SECONDS = 10.0
AGAIN_SECONDS = 0.4
"""How long a worker of another machine may take to connect again after a reset, which may come of its death."""
LOOK_SECONDS = 0.02


class Hub:
    """The hub of a membership.

    Args:
        world_size: the number of workers.
        skips_dead: whether barriers are opened without the ranks that have died.
        liveness: when a connection without an answer ends.
        to_self: takes the messages to rank 0.

    Attributes:
        token: what a connection must begin with; set before the hub listens.
    """

    token: str

    def __init__(
        self,
        world_size: int,
        skips_dead: bool,
        liveness: Liveness,
        to_self: Callable[[dict[str, Any]], None],
    ) -> None:
        self.world_size = world_size
        self._skips_dead = skips_dead
        self._liveness = liveness
        self._to_self = to_self
        self._members: dict[int, dict[str, Any]] = {}
        self._links: dict[int, Link] = {}
        self._connections: set[asyncio.Task[None]] = set()
        self._arrived: dict[str, set[int]] = {}
        self._groups: dict[str, Sequence[int]] = {}
        self._dead: set[int] = set()

    async def listen(self, host: str) -> int:
        """Accept connections at that address; returns the port."""
        self._server = await asyncio.start_server(self._accept, host, 0, limit=MAX_LINE, backlog=1024)
        return int(self._server.sockets[0].getsockname()[1])

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            if await self._knows_token(reader):
                with contextlib.suppress(OSError):  # it has broken before it began
                    await self._serve(reader, writer)
            else:
                log.warning(
                    "the membership hub refused a connection without the token from %s",
                    writer.get_extra_info("peername"),
                )
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

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a worker that connects, for the first time or again, until the connection ends."""
        keep_alive(writer, self._liveness)
        hello = await asyncio.wait_for(read_line(reader), JOIN_SECONDS)
        rank = int(hello["rank"])
        if rank in self._dead:
            writer.write(b'{"refused": true}\n')
            return
        if "watchdog" in hello:
            await self._hear_watchdog(rank, reader, writer)
            return
        link = self._links.setdefault(rank, Link())
        writer.write(b'{"received": %d}\n' % link.received)
        link.attach(writer, hello["received"])
        turn = link.turn
        cause = await link.receive_all(reader, self.handle)
        if cause == RESET:
            if link.turn == turn:
                link.writer = None
            await self._may_come_again(rank, lambda: link.turn > turn)
            cause = DIED
        if (
            link.turn == turn and self._links.get(rank) is link
        ):  # it has not come again, nor said that it left
            await self.handle({"failed": rank, "report": "", "cause": cause})

    async def _hear_watchdog(
        self, rank: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if not await is_heard(reader, writer, self._liveness):
            link = self._links.get(rank)
            await self.handle({"failed": rank, "report": "", "cause": STOPPED})
            if link is not None and link.writer is not None:
                link.writer.close()  # if it goes on, it sees that the others have gone on without it

    async def _may_come_again(self, rank: int, has_come: Callable[[], bool]) -> None:
        """Wait until a worker whose connection was reset has connected again, or it is plain that it will not."""
        member = self._members.get(rank, {})
        here = member.get("process_table") == process_table()
        deadline = time.monotonic() + (self._liveness.patience if here else AGAIN_SECONDS)
        while time.monotonic() < deadline and not has_come():
            if here and not is_running(member["pid"]):
                return
            await asyncio.sleep(LOOK_SECONDS)

    async def handle(self, message: dict[str, Any]) -> None:
        """Do what follows from a message."""
        if "join" in message:
            self._members[message["join"]["rank"]] = message["join"]
            if len(self._members) == self.world_size:
                await self._broadcast({"members": [self._members[r] for r in range(self.world_size)]})
        elif "arrive" in message:
            key = message["arrive"]
            self._arrived.setdefault(key, set()).add(message["rank"])
            self._groups[key] = message["group"]
            await self._open(key)
        elif "left" in message and message["left"] != HUB:
            self._links.pop(message["left"], None)
        elif message.get("failed") not in self._dead:
            if "failed" in message:
                self._dead.add(message["failed"])
                self._links.pop(message["failed"], None)
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
        links = [link for rank, link in self._links.items() if ranks is None or rank in ranks]
        for link in links:
            link.put(message)
        for link in links:
            await link.drain()
        if ranks is None or HUB in ranks:
            self._to_self(message)

    async def close(self) -> None:
        """End the connections."""
        self._server.close()
        for link in self._links.values():
            if link.writer is not None:
                link.writer.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
