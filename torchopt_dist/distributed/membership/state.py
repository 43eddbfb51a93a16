"""Messages of the hub → who has joined, was lost or was replaced; and waits for such events."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from torchopt_dist.distributed.membership.hub import HUB, START, Barrier
from torchopt_dist.distributed.membership.link import DIED, OVER
from torchopt_dist.distributed.membership.members import Failure, Member
from torchopt_dist.distributed.rendezvous.store import GroupEndedError
from torchopt_dist.errors import PeerFailedError, WorkerLostError
from torchopt_dist.process.out_of_memory import out_of_memory_kills

__all__ = ["MembershipState"]


class MembershipState:
    """What a worker knows about the others.

    Attributes:
        members: all workers, by rank, once they have joined.
        failures: the ranks that have failed or were lost, in the order of the events.
        replaced: for the ranks that were lost and have a new process, how they were lost the last time.
        joins_late: whether this worker replaces a lost one, and joins a running group.
    """

    def __init__(self, me: Member, world_size: int) -> None:
        self.me = me
        self.world_size = world_size
        self.members: tuple[Member, ...] = ()
        self.failures: dict[int, Failure] = {}
        self.replaced: dict[int, Failure] = {}
        self.joins_late = self._known = self._over = False
        self._started = self._hub_left = self._closing = False
        self._all_answered = True
        self._kills_before = out_of_memory_kills()
        self._released: set[Barrier] = set()
        self._turns: dict[tuple[str, tuple[int, ...]], int] = {}
        self._changed = threading.Condition()

    @property
    def lost(self) -> dict[int, WorkerLostError]:
        """The ranks that were lost, with the error that says how, in the order in which they were."""
        errors = {rank: failure.error() for rank, failure in tuple(self.failures.items())}
        return {rank: error for rank, error in errors.items() if isinstance(error, WorkerLostError)}

    def loss_of(self, rank: int) -> PeerFailedError | WorkerLostError:
        """How the last process of a rank was lost; another process may have the rank now."""
        failure = self.failures.get(rank) or self.replaced.get(rank)
        return (failure or self._failure(rank)).error()

    def goes_on_without(self, rank: int) -> bool:
        """Whether the group goes on if that rank is lost."""
        runs = self._started or self.me.incarnation > 0  # who replaces a lost worker comes to others that run
        return self.me.on_loss != "end" and runs and rank != HUB

    def check(self, ranks: Sequence[int] | None = None) -> None:
        """Raise if a rank has reported a failure, or if one of ``ranks`` is lost that the group needs."""
        for failure in tuple(self.failures.values()):
            if failure.report or failure.rank == HUB:
                raise failure.error()
            if (ranks is None or failure.rank in ranks) and not self.goes_on_without(failure.rank):
                raise failure.error()

    def why_lost(self, rank: int, timeout: float) -> PeerFailedError | WorkerLostError | None:
        """How a rank failed or was lost; waits ``timeout`` seconds at most for that to become known."""
        with self._changed:
            self._changed.wait_for(lambda: rank in self.failures or self._closing, timeout)
        failure = self.failures.get(rank)
        return None if failure is None else failure.error()

    def _wait(
        self,
        condition: Callable[[], bool],
        timeout: float | None,
        what: str,
        ranks: Sequence[int] | None = None,
        late: Callable[[str], Exception] = WorkerLostError,
    ) -> None:
        """Wait for a condition; raises as :meth:`check`, ``late`` if it is not in time, and ``GroupEndedError``.

        Who does not come in time to what has begun hangs, or is as good as lost.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while True:
                self.check(ranks)  # first, since a rank that came to a barrier may have died after that
                if condition():
                    return
                if self._over:
                    raise GroupEndedError
                if self._closing:
                    raise GroupEndedError(f"rank {self.me.rank} left the group while it waited for {what}")
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise late(f"rank {self.me.rank} waited {timeout:g} s for {what}")
                self._changed.wait(left)

    def _note(self, message: dict[str, Any]) -> Failure | Member | None:
        """Record a message; returns a failure or a new process, of which more than the waiting threads must know."""
        news: Failure | Member | None = None
        if "members" in message:
            self._meet(**message)
        elif "release" in message:
            released = Barrier.of(message["release"])
            self._released.add(released)
            self._started = self._started or released.purpose == START
        elif "left" in message:
            self._hub_left = True
            self._over = self.me.incarnation > 0 and not self._started
        elif "unanswered" in message:
            self._all_answered = False
        elif "known" in message:
            self._known = True
        elif OVER in message:
            self._over = True
        elif "announced" in message:
            news = Member(**message["announced"])
            self._set_member(news)
        elif "back" in message:
            self._come_back(message["back"], message.get("opened", ()))
        elif self._is_new(**message):
            news = self._failure(**message)
            self.failures[news.rank] = news
        self._changed.notify_all()
        return news

    def _meet(self, members: list[dict[str, Any]], failures: list[dict[str, Any]] | None = None) -> None:
        """Record all workers, and those that were lost before this one joined."""
        self.members = tuple(Member(**member) for member in members)
        if failures is not None:
            self.joins_late = True
            for failure in failures:
                self.failures[failure["failed"]] = self._failure(**failure)

    def _set_member(self, member: Member) -> None:
        """Record the new process of a rank."""
        before, after = self.members[: member.rank], self.members[member.rank + 1 :]
        if self.members:  # otherwise this worker has yet to be told of all
            self.members = (*before, member, *after)

    def _come_back(self, rank: int, opened: Sequence[Sequence[Any]]) -> None:
        """Record that a rank, perhaps this one, has a new process that can be called."""
        if rank == self.me.rank:
            self._started = True
            self._released.clear()
            for purpose, ranks, turn in map(Barrier.of, opened):
                self._turns[purpose, ranks] = turn
        elif rank in self.failures:
            self.replaced[rank] = self.failures.pop(rank)

    def _is_new(self, failed: int, report: str = "", **_: object) -> bool:
        """Whether this is news: of a rank that was lost, only what its new process has raised."""
        known = self.failures.get(failed)
        return failed != self.me.rank and (known is None or bool(report and not known.report))

    def _failure(
        self, failed: int, report: str = "", summary: str = "", cause: str = DIED, **_: object
    ) -> Failure:
        of = self.members[failed] if self.members else Member(failed, "", "")
        seen = cause == DIED and not report and of.process_table == self.me.process_table
        out_of_memory = seen and out_of_memory_kills() > self._kills_before
        return Failure(failed, report, summary, cause, of.name, of.host, out_of_memory)
