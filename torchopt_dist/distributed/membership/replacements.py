"""A new process with a lost worker's rank → a process that all others know and can call.

Rank 0's side: what the hub of a membership does with ``on_loss="replace"``. First all others are told where the new
process listens, so that it can call them; when it is ready, that it can be called. Each announcement ends when all have
confirmed it, rank 0 as the last one. So no worker gets a request from a worker that it does not know.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any

from torchopt_dist.distributed.membership.link import OVER, Link

__all__ = ["Replacements", "waits_for_nobody"]

LOOK_SECONDS = 0.005
OLD_SECONDS = 2.0
"""For the connection of a process that has died to end, when the next one is there."""
STALE = "the others go on without this rank"


@dataclass
class _Telling:
    """An announcement to all: the workers that have not confirmed it, and an event for when all have."""

    waiting: set[int]
    done: asyncio.Event = field(default_factory=asyncio.Event)


class Replacements:
    """The processes that replace lost workers, if they are ``wanted``.

    Attributes:
        incarnations: by rank, how often it was given to a new process; a missing rank has 0.
        joining: the ranks whose new process cannot be called yet.
        over: whether no more are accepted, since all workers are ending.
    """

    def __init__(
        self,
        wanted: bool,
        links: dict[int, Link],
        dead: dict[int, dict[str, Any]],
        to_self: Callable[[dict[str, Any]], None],
    ) -> None:
        self.wanted = wanted
        self.incarnations: dict[int, int] = {}
        self.joining: set[int] = set()
        self.over = False
        self._links = links
        self._dead = dead
        self._to_self = to_self
        self._tellings: dict[int, _Telling] = {}
        self._numbers = itertools.count()

    def incarnation(self, rank: int) -> int:
        """How often a rank was given to a new process."""
        return self.incarnations.get(rank, 0)

    async def refusal(self, rank: int, incarnation: int, lose: Callable[[int], Any], complete: bool) -> str:
        """The reason for which a process that connects is refused; empty if it is accepted.

        ``lose`` is called with the rank if the process before it has not been found to be lost in time; if the group
        was ``complete``, the process joins a running group.
        """
        if incarnation == self.incarnation(rank):
            return STALE if rank in self._dead and rank not in self.joining else ""
        if incarnation < self.incarnation(rank) or not self.wanted:
            return STALE
        deadline = time.monotonic() + (0.0 if self.over else OLD_SECONDS)
        while rank in self._links and time.monotonic() < deadline:
            await asyncio.sleep(LOOK_SECONDS)
        if self.over:
            return OVER
        if incarnation <= self.incarnation(rank):
            return STALE  # the next one has come meanwhile
        if rank in self._links:  # who starts a new process has seen the end of the old one
            await lose(rank)
        self.incarnations[rank] = incarnation
        if complete:
            self.joining.add(rank)
        return ""

    async def announce(self, member: dict[str, Any]) -> None:
        """Tell all workers where a new process listens, and then tell the process that they know."""
        rank, incarnation = member["rank"], member["incarnation"]
        if self._is_joining(rank, incarnation):
            await self._tell({"announced": member}, rank)
        if self._is_joining(rank, incarnation):
            self._links[rank].put({"known": True})

    async def readmit(self, rank: int, incarnation: int, opened: Mapping[Any, Any]) -> None:
        """Tell all that a new process can be called, and tell it the barriers that have opened by then."""
        if self._is_joining(rank, incarnation):
            await self._tell({"back": rank}, rank)
        if self._is_joining(rank, incarnation):
            self.joining.discard(rank)
            del self._dead[rank]
            self._to_self({"back": rank})
            self._links[rank].put({"back": rank, "opened": [*opened.values()]})

    def told(self, number: int, rank: int) -> None:
        """Record that a worker has confirmed an announcement."""
        telling = self._tellings.get(number)
        if telling is not None:
            telling.waiting.discard(rank)
            if not telling.waiting:
                telling.done.set()

    def lost(self, rank: int) -> None:
        """Record that a worker was lost or has left, so that it confirms nothing more."""
        self.joining.discard(rank)
        for number in tuple(self._tellings):
            self.told(number, rank)

    def end(self) -> None:
        """Accept no more replacements."""
        self.over = True
        for rank in self.joining & self._links.keys():
            self._links[rank].put({OVER: True})

    def _is_joining(self, rank: int, incarnation: int) -> bool:
        if self.over:
            return False
        return rank in self.joining and rank in self._links and self.incarnation(rank) == incarnation

    async def _tell(self, message: dict[str, Any], about: int) -> None:
        """Tell all workers but one, and wait until they have confirmed."""
        number = next(self._numbers)
        telling = self._tellings[number] = _Telling(self._links.keys() - {about})
        for rank in tuple(telling.waiting):
            self._links[rank].put({**message, "tell": number})
        if "announced" in message:
            self._to_self(message)
        if telling.waiting:
            await telling.done.wait()
        del self._tellings[number]


def waits_for_nobody(
    arrived: set[int], at_end: set[int], live: set[int], incarnations: Container[int]
) -> bool:
    """Whether only replacements wait at a barrier, and all others that live are at the end of their ``main``.

    Replacements began later, so they may reach more barriers than the others still had before them.
    """
    return bool(at_end) and all(rank in incarnations for rank in arrived) and live - arrived <= at_end
