"""Rank 0's side of the membership: messages of all workers → the resulting messages to all, rank 0 included."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

from torchopt_dist.distributed.membership.link import (
    DIED,
    RESET,
    STOPPED,
    Link,
    keep_alive,
    read_line,
)
from torchopt_dist.distributed.membership.listener import Listener
from torchopt_dist.distributed.membership.replacements import Replacements, waits_for_nobody
from torchopt_dist.distributed.membership.stopped import is_heard, is_running, process_table
from torchopt_dist.process.liveness import Liveness

__all__ = ["END", "HUB", "JOIN_SECONDS", "START", "Barrier", "Hub"]

HUB = 0
START, END = "start", "end"
"""The purposes of the first barrier, which waits for the dead, too, as without all ranks there is no group; and of the
one at which ``main`` has returned on all ranks."""
JOIN_SECONDS = 10.0
AGAIN_SECONDS = 0.4
"""How long a worker of another machine may take to connect again after a reset, which may come of its death."""
LOOK_SECONDS = 0.02


class Barrier(NamedTuple):
    """The turn, 1 for the first, of a barrier of these ranks, in order, for a purpose; empty if it is the program's."""

    purpose: str
    ranks: tuple[int, ...]
    turn: int

    @classmethod
    def of(cls, content: Sequence[Any]) -> Barrier:
        """As it was before it was sent."""
        purpose, ranks, turn = content
        return cls(purpose, tuple(ranks), turn)


class Hub:
    """The hub of a membership; ``to_self`` takes the messages to rank 0.

    If the workers go on when one is lost, as ``on_loss`` says, barriers are opened without those that have died.
    """

    def __init__(
        self,
        world_size: int,
        on_loss: str,
        liveness: Liveness,
        to_self: Callable[[dict[str, Any]], None],
    ) -> None:
        self.world_size = world_size
        self._on_loss = on_loss
        self._liveness = liveness
        self._to_self = to_self
        self._members: dict[int, dict[str, Any]] = {}
        self._links: dict[int, Link] = {}
        self._listener = Listener("the membership hub", self._serve)
        self._tellings: set[asyncio.Task[None]] = set()
        self._arrived: dict[Barrier, set[int]] = {}
        self._opened: dict[
            tuple[str, tuple[int, ...]], Barrier
        ] = {}  # of each purpose and ranks the last turn
        self._dead: dict[int, dict[str, Any]] = {}
        self._left: set[int] = set()
        self._replacements = Replacements(on_loss == "replace", self._links, self._dead, to_self)

    async def listen(self, host: str, token: str) -> int:
        """Accept connections that begin with the token at that address; returns the port."""
        self._listener.token = token
        return await self._listener.listen(host, self.world_size)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a worker that connects, for the first time or again, until the connection ends."""
        keep_alive(writer, self._liveness)
        hello = await asyncio.wait_for(read_line(reader), JOIN_SECONDS)
        rank = int(hello["rank"])
        refusal = await self._replacements.refusal(
            rank, int(hello["incarnation"]), self._lose, self._is_complete
        )
        if refusal:
            writer.write(json.dumps({"refused": refusal}).encode() + b"\n")
            return
        if "watchdog" in hello:
            await self._hear_watchdog(rank, reader, writer)
            return
        link = self._links.setdefault(rank, Link())
        writer.write(b'{"received": %d}\n' % link.received)
        link.attach(writer, hello["received"])
        turn = link.turn

        async def handle(message: dict[str, Any]) -> None:
            if self._links.get(rank) is link:  # and it does not come of one that was lost, late
                await self.handle(message)

        cause = await link.receive_all(reader, handle)
        if cause == RESET:
            if link.turn == turn:
                link.writer = None
            await self._may_come_again(rank, lambda: link.turn > turn)
            cause = DIED
        if (
            link.turn == turn and self._links.get(rank) is link
        ):  # it has not come again, nor said that it left
            await self._lose(rank, cause)

    @property
    def _is_complete(self) -> bool:
        return len(self._members) == self.world_size

    async def _lose(self, rank: int, cause: str = DIED, **of: int) -> None:
        await self.handle({"failed": rank, "cause": cause, **of})

    async def _hear_watchdog(
        self, rank: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        of = self._replacements.incarnation(rank)
        if not await is_heard(reader, writer, self._liveness):
            link = self._links.get(rank)
            await self._lose(rank, STOPPED, incarnation=of)
            if link is not None and link.writer is not None:
                link.writer.close()  # if it goes on, it sees that the others have gone on without it

    async def _may_come_again(self, rank: int, has_come: Callable[[], bool]) -> None:
        """Wait until a worker whose connection was reset has connected again, or it is certain that it will not."""
        member = self._members.get(rank, {})
        here = member.get("process_table") == process_table()
        deadline = time.monotonic() + (self._liveness.patience if here else AGAIN_SECONDS)
        while time.monotonic() < deadline and not has_come():
            if here and not is_running(member["pid"]):
                return
            await asyncio.sleep(LOOK_SECONDS)

    async def handle(self, message: dict[str, Any]) -> None:
        """Handle a message."""
        if "join" in message:
            await self._join(message["join"])
        elif "arrive" in message:
            barrier = Barrier.of(message["arrive"])
            self._arrived.setdefault(barrier, set()).add(message["rank"])
            await self._open_all([*self._arrived] if barrier.purpose == END else [barrier])
        elif "left" in message and message["left"] != HUB:
            self._links.pop(message["left"], None)
            self._left.add(message["left"])
            self._replacements.lost(message["left"])
        elif "told" in message:
            self._replacements.told(message["told"], message["rank"])
        elif "announce" in message:
            self._members[message["announce"]["rank"]] = message["announce"]
            self._go_on_with(self._replacements.announce(message["announce"]))
        elif "ready" in message:
            rank, incarnation = message["ready"], message["incarnation"]
            self._go_on_with(self._replacements.readmit(rank, incarnation, self._opened))
        elif "failed" in message:
            await self._fail(message)
        else:
            if "left" in message:
                self._replacements.end()
            await self._broadcast(message)

    def _go_on_with(self, telling: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine that waits for answers, while other messages are handled."""
        task = asyncio.ensure_future(telling)
        self._tellings.add(task)
        task.add_done_callback(self._tellings.discard)

    async def _join(self, member: dict[str, Any]) -> None:
        rank = member["rank"]
        joins_late = rank in self._replacements.joining
        if not joins_late:
            self._members[rank] = member
        if not self._is_complete:
            return
        message = {"members": [self._members[r] for r in range(self.world_size)]}
        if joins_late:
            lost = [failure for dead, failure in self._dead.items() if dead != rank]
            self._links[rank].put({**message, "failures": lost})
        else:
            await self._broadcast(message)

    async def _fail(self, message: dict[str, Any]) -> None:
        rank, replacements = message["failed"], self._replacements
        of = message.pop("incarnation", replacements.incarnation(rank))
        if of != replacements.incarnation(rank) or (rank in self._dead and rank not in replacements.joining):
            return
        if rank in self._left:
            return  # its process has ended, as it has said
        self._dead[rank] = message
        self._links.pop(rank, None)
        replacements.lost(rank)
        started = any(purpose == START for purpose, _ in self._opened)
        if message.get("report") or self._on_loss == "end" or not started:
            replacements.end()
        await self._broadcast(message)
        await self._open_all([*self._arrived])

    async def _open_all(self, barriers: Sequence[Barrier]) -> None:
        for barrier in barriers:
            if barrier in self._arrived:
                await self._open(barrier)

    async def _open(self, barrier: Barrier) -> None:
        """Open a barrier, if all its ranks have come."""
        arrived = self._arrived[barrier]
        skipped = set() if self._on_loss == "end" or barrier.purpose == START else set(self._dead)
        if not barrier.purpose:
            skipped |= self._at_end_for(arrived)
        if arrived | skipped >= set(barrier.ranks):
            self._opened[barrier.purpose, barrier.ranks] = barrier
            del self._arrived[barrier]
            if barrier.purpose == END:
                self._replacements.end()
            await self._broadcast({"release": barrier}, barrier.ranks)

    def _at_end_for(self, arrived: set[int]) -> set[int]:
        """The ranks whose ``main`` has ended, if only replacements wait at the barrier."""
        at_end = {rank for barrier, came in self._arrived.items() if barrier.purpose == END for rank in came}
        live = set(range(self.world_size)) - self._dead.keys()
        return at_end if waits_for_nobody(arrived, at_end, live, self._replacements.incarnations) else set()

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
        for link in self._links.values():
            if link.writer is not None:
                link.writer.close()
        for task in self._tellings:
            task.cancel()
        await asyncio.gather(self._listener.close(), *self._tellings, return_exceptions=True)
