"""Requests that wait for a reply → failures, by worker when it is lost, and by time when the reply is late."""

from __future__ import annotations

import copy
import heapq
import itertools
import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable

from torchopt_dist.distributed.membership.members import Member
from torchopt_dist.distributed.messages.message import Message
from torchopt_dist.errors import CallTimeoutError, WorkerLostError
from torchopt_dist.process.future import Future, as_completed

__all__ = ["Alarms", "Pending", "disconnected", "late"]

log = logging.getLogger(__name__)

PURGE_AT = 1000
"""How many alarms there are before those that are over are forgotten."""


class Pending:
    """The futures of expected replies, by worker."""

    def __init__(self) -> None:
        self._waiting: defaultdict[int, set[Future[Message]]] = defaultdict(set)

    def counts(self) -> dict[int, int]:
        """How many replies are expected of each worker of which there are some."""
        return {worker: len(futures) for worker, futures in tuple(self._waiting.items()) if futures}

    def add(self, worker: int) -> Future[Message]:
        """A future of a reply of ``worker``."""
        future: Future[Message] = Future()
        waiting = self._waiting[worker]
        waiting.add(future)
        future.add_done_callback(waiting.discard)
        return future

    def fail(self, worker: int, error: Exception) -> None:
        """Let all requests to ``worker`` fail."""
        for future in tuple(self._waiting[worker]):
            future.set_exception(copy.copy(error))  # each caller adds frames and notes of its own

    def fail_all(self, error: Exception) -> None:
        """Let all requests fail."""
        for worker in tuple(self._waiting):
            self.fail(worker, error)

    def wait(self, timeout: float) -> set[int]:
        """Wait at most ``timeout`` seconds for all replies; returns the workers whose replies are missing."""
        deadline = time.monotonic() + timeout
        while waiting := {
            worker: tuple(futures) for worker, futures in tuple(self._waiting.items()) if futures
        }:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            deque(as_completed(itertools.chain.from_iterable(waiting.values()), left), maxlen=0)
        return set(waiting)


def disconnected(member: Member, reason: object) -> WorkerLostError:
    """The error of a connection between two workers that broke, if nothing more is known."""
    return WorkerLostError(
        f"the connection to {member.name} broke: {reason}",
        rank=member.rank,
        worker=member.name,
        host=member.host,
    )


def late(function: str, where: str, seconds: float) -> CallTimeoutError:
    """The error of a request, for a ``function`` if that has a name, that has not been answered in so many seconds."""
    return CallTimeoutError(
        f"{function and f'`{function}` on '}{where} took longer than timeout={seconds:g} s; it may itself wait for "
        "another worker: `todist.status()` shows who waits for whom"
    )


class Alarms:
    """Calls functions at their times, in a thread that is started for the first of them.

    What one raises is logged, and the others are called all the same; an alarm whose number ``is_over`` may be dropped.
    """

    def __init__(self, is_over: Callable[[int], bool]) -> None:
        self._is_over = is_over
        self._alarms: list[tuple[float, int, int | None, Callable[[], None]]] = []
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._purge_at = PURGE_AT

    def set(self, seconds: float, number: int | None, ring: Callable[[], None]) -> None:
        """Call ``ring`` in so many seconds; with ``None`` for ``number`` the alarm is never dropped."""
        with self._changed:
            if self._closed:
                return
            heapq.heappush(self._alarms, (time.monotonic() + seconds, next(self._order), number, ring))
            if len(self._alarms) >= self._purge_at:
                self._alarms = [
                    each for each in self._alarms if each[2] is None or not self._is_over(each[2])
                ]
                heapq.heapify(self._alarms)
                self._purge_at = max(PURGE_AT, 2 * len(self._alarms))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="todist-alarms", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """End the thread; further alarms are not called."""
        with self._changed:
            self._closed = True
            self._alarms.clear()
            self._changed.notify()

    def _work(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                now = time.monotonic()
                if not self._alarms or self._alarms[0][0] > now:
                    self._changed.wait(self._alarms[0][0] - now if self._alarms else None)
                    continue
                ring = heapq.heappop(self._alarms)[3]
            try:
                ring()
            except Exception:  # such as one moment without free descriptors
                log.exception("an alarm has raised")
