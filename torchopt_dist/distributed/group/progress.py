"""``progress=True`` → a bar at the caller that shows how many of a call's tasks are done, on all workers together.

A worker reports its finished tasks from time to time; the reply reports the rest.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Self

from torchopt_dist.distributed.group.group import answering_group
from torchopt_dist.process.future import Future
from torchopt_dist.process.progress_bar import tasks_or_steps

__all__ = ["Bar", "teller"]

TELL_SECONDS = 0.2
"""How often a worker tells the caller how far it is."""


class Bar:
    """A bar of a call. It is shown until the context is left, on a terminal or in a notebook, and nowhere else.

    ``shares`` are the numbers of tasks, by rank; workers report tasks by ``ticket``, the caller's rank and a number.
    Raises :class:`ImportError` if tqdm is not installed.
    """

    def __init__(self, title: str, shares: dict[int, int]) -> None:
        self._group = group = answering_group()
        self._done = dict.fromkeys(shares, 0)
        self._shares = shares
        self._lock = threading.Lock()
        self._bar = tasks_or_steps(title, sum(shares.values()), "task")
        self.ticket = group.rank, next(group.numbers)
        group.bars[self.ticket[1]] = self.told

    def told(self, worker: int, done: int) -> None:
        """Record how many tasks of its share a worker has finished; tasks of a lost worker count as that worker's."""
        done = min(done, self._shares.get(worker, 0))
        with self._lock:
            if done > self._done.get(worker, 0):
                self._bar.update(done - self._done[worker])
                self._done[worker] = done

    def watch(self, shares: Mapping[int, Future[list[Any]]]) -> None:
        """Count a worker's share as finished when its values are there."""
        for worker, share in shares.items():
            share.add_done_callback(partial(self._ended, worker))

    def _ended(self, worker: int, share: Future[list[Any]]) -> None:
        if share.exception() is None:
            self.told(worker, self._shares[worker])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._group.bars.pop(self.ticket[1], None)
        with self._lock:
            self._bar.close()


def teller(ticket: tuple[int, int], total: int) -> Callable[[int], None]:
    """On the worker: a function to call with the number of tasks that are done, of so many, after each."""
    group, (caller, number) = answering_group(), ticket
    told = time.monotonic()

    def tell(done: int) -> None:
        nonlocal told
        now = time.monotonic()
        if done == total or now - told < TELL_SECONDS:  # the reply tells of the last one
            return
        told = now
        if caller == group.rank:
            _told(number, group.rank, done)
        else:
            group.ask(caller, _told, number, group.rank, done)

    return tell


def _told(number: int, worker: int, done: int) -> None:
    """At the caller: update the bar, unless it is closed."""
    bar = answering_group().bars.get(number)
    if bar is not None:
        bar(worker, done)
