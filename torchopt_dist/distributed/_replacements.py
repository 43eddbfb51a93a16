"""A new process that has a lost worker's rank → known to all the others, and then one of them.

Rank 0's side: what the hub of a membership does with ``on_loss="replace"``. First all others are told where the new
process listens, so that it can ask them; when it is ready, that it can be asked. Each telling is over when all have
answered that they know, rank 0 as the last one. So nobody is asked by a worker that it does not know.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Any

from torchopt_dist.distributed._membership_link import OVER, Link

__all__ = ["Replacements", "waits_for_nobody"]

LOOK_SECONDS = 0.005
OLD_SECONDS = 2.0
"""For the connection of a process that has died to end, when the next one is there."""
STALE = "the others go on without this rank"


@dataclass
class _Telling:
    """Something that all are told: who has not answered, and when all have."""

    waiting: set[int]
    done: asyncio.Event = field(default_factory=asyncio.Event)


class Replacements:
    """The processes that replace lost workers.

    Args:
        wanted: whether there are any.
        links: to the workers, by rank; a replacement's own is added where it connects.
        dead: the ranks that were lost, and were not replaced.
        to_self: takes the messages to rank 0.

    Attributes:
        incarnations: by rank, how often it was given to a new process; 0 where it is missing.
        joining: the ranks that have a new process, which cannot be asked yet.
        over: whether no more are wanted, since all are at their end.
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
        """Why a process that connects is refused; empty if it is not.

        Args:
            rank: its rank.
            incarnation: of how many it is.
            lose: called with the rank if the process before it has not been found to be lost in time.
            complete: whether the group was complete, so that the process comes to one that runs.
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
        """Let all know where a new process listens, and then the process that they do."""
        rank, incarnation = member["rank"], member["incarnation"]
        if self._is_joining(rank, incarnation):
            await self._tell({"announced": member}, rank)
        if self._is_joining(rank, incarnation):
            self._links[rank].put({"known": True})

    async def readmit(self, rank: int, incarnation: int, sequence: dict[str, int]) -> None:
        """Let all know that a new process can be asked.

        Args:
            rank: its rank.
            incarnation: which it is.
            sequence: how often each barrier was opened, which goes on while others are told.
        """
        if self._is_joining(rank, incarnation):
            await self._tell({"back": rank}, rank)
        if self._is_joining(rank, incarnation) and not self.over:
            self.joining.discard(rank)
            del self._dead[rank]
            self._to_self({"back": rank})
            self._links[rank].put({"back": rank, "sequence": dict(sequence)})

    def told(self, number: int, rank: int) -> None:
        """A worker has answered."""
        telling = self._tellings.get(number)
        if telling is not None:
            telling.waiting.discard(rank)
            if not telling.waiting:
                telling.done.set()

    def lost(self, rank: int) -> None:
        """A worker was lost, which answers no more, or has left in order."""
        self.joining.discard(rank)
        for number in tuple(self._tellings):
            self.told(number, rank)

    def end(self) -> None:
        """No more are wanted."""
        self.over = True
        for rank in self.joining & self._links.keys():
            self._links[rank].put({OVER: True})

    def _is_joining(self, rank: int, incarnation: int) -> bool:
        return rank in self.joining and rank in self._links and self.incarnation(rank) == incarnation

    async def _tell(self, message: dict[str, Any], about: int) -> None:
        """Tell all but one, and wait until they know."""
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

    They began theirs later, so they may meet more barriers than the others had left.
    """
    return bool(at_end) and all(rank in incarnations for rank in arrived) and live - arrived <= at_end
