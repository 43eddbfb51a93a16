"""Measured seconds of a task on each worker → how many tasks each gets in the next call, or evenly many."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

from torchopt_dist.distributed.group.group import current_group
from torchopt_dist.distributed.world import get_worker_id

__all__ = [
    "Balance",
    "check_balance",
    "check_workers",
    "even_share",
    "ranges",
    "ranks_of",
    "spread",
    "taking_readings",
]

WORTH = 1.05
"""How many times as long the longest share must be before tasks move, so that they do not move with every reading."""


class Balance:
    """Gives faster workers more tasks, in calls that are made over and over.

    Give an object of this class to :func:`dim_partitioner` or :func:`map`, one to each function: the calls that use the
    same object are measured together. The first call splits its tasks evenly. Each worker measures how long its tasks
    take in forward, and each next call is split so that the worker that takes longest takes as short as possible. Each
    worker gets at least one task, if there are enough, so that it goes on being measured.

    Results stay in order, each task has the same seed wherever it runs, and reducers weigh parts by their size. But
    sums over a worker's samples are made in another order when the shares change, so two runs do not agree bit for bit.

    Args:
        seconds: by rank, how long a task takes, as :attr:`seconds` of an earlier run; ranks that are missing are taken
            for average ones.
        fixed: whether nothing is measured, and ``seconds`` stay as they are, so that all calls are split alike.

    Attributes:
        seconds: by rank, how long a task has taken; the mean of the last reading and of what stood here before.

    Raises:
        ValueError: ``seconds`` are not positive, or are missing although ``fixed``.
        TypeError: ``fixed`` is not True or False, or ``seconds`` is no mapping of ranks.

    Example::

        by_speed = todist.dim_partitioner(0, exclusive=True, keepdim=False, balance=todist.Balance())


        @todist.parallelize(by_speed, todist.mean_reducer)
        def task_loss(model, x, y): ...
    """

    def __init__(self, seconds: Mapping[int, float] | None = None, *, fixed: bool = False) -> None:
        if not isinstance(fixed, bool):
            raise TypeError(f"fixed must be True or False, got {fixed!r}")
        if seconds is not None and not isinstance(seconds, Mapping):
            raise TypeError(f"seconds must map ranks to numbers, got {seconds!r:.80}")
        for rank, value in (seconds or {}).items():
            if isinstance(rank, bool) or not isinstance(rank, int):
                raise TypeError(f"seconds must map ranks to numbers, got the key {rank!r}")
            if not value > 0:
                raise ValueError(f"seconds must be positive, got {value!r} for rank {rank}")
        if fixed and not seconds:
            raise ValueError(
                "fixed=True needs the seconds of a task by rank: Balance({0: 1.0, 1: 2.0}, fixed=True)"
            )
        self.seconds = dict(seconds or {})
        self.fixed = fixed
        self._before: tuple[int, tuple[int, ...], list[int]] = (0, (), [])

    def shares(self, tasks: int, workers: Sequence[int]) -> list[int]:
        """How many tasks each of these workers gets.

        Args:
            tasks: how many there are.
            workers: their ranks.
        """
        known = [self.seconds[worker] for worker in workers if worker in self.seconds]
        if tasks < len(workers) or not known:
            ranges = [even_share(tasks, len(workers), index) for index in range(len(workers))]
            return [stop - start for start, stop in ranges]
        usual = sum(known) / len(known)
        seconds = [self.seconds.get(worker, usual) for worker in workers]
        found = _shortest(tasks, seconds)
        count, ranks, before = self._before
        if (count, ranks) == (tasks, tuple(workers)) and _longest(before, seconds) <= WORTH * _longest(
            found, seconds
        ):
            return before
        self._before = tasks, tuple(workers), found
        return found

    def __repr__(self) -> str:
        listed = ", ".join(f"{rank}: {seconds:.3g}" for rank, seconds in sorted(self.seconds.items()))
        return f"{type(self).__name__}({{{listed}}}{', fixed=True' if self.fixed else ''})"


def check_balance(balance: object) -> None:
    """Raise :class:`TypeError` unless it is a :class:`Balance` or ``None``."""
    if not isinstance(balance, (Balance, type(None))):
        raise TypeError(f"balance must be a todist.Balance() or None, got {balance!r:.80}")


def taking_readings(partitioner: object) -> Callable[[int, float], None] | None:
    """Who is to be told a worker's rank and how long a sample takes there, by a partitioner's attribute ``balance``."""
    balance = getattr(partitioner, "balance", None)
    if not isinstance(balance, Balance) or balance.fixed:
        return None

    def took(worker: int, seconds: float) -> None:
        if seconds > 0:
            balance.seconds[worker] = (balance.seconds.get(worker, seconds) + seconds) / 2

    return took


def ranges(
    size: int, ranks: Sequence[int], balance: Balance | None, *, exclusive: bool = True
) -> list[tuple[int, int, int]]:
    """The worker of each part, and the part's half-open range of indices; parts are in order, and none is empty.

    Without a ``balance`` they are even; ``exclusive`` makes each index a part of its own.
    """
    if balance is None:
        parts = size if exclusive else min(size, len(ranks))
        return [(rank, *even_share(size, parts, part)) for part, rank in enumerate(spread(parts, ranks))]
    shares = balance.shares(size, ranks)
    if exclusive:
        workers = [rank for rank, count in zip(ranks, shares, strict=True) for _ in range(count)]
        return [(rank, index, index + 1) for index, rank in enumerate(workers)]
    found = zip(ranks, shares, accumulate(shares), strict=True)
    return [(rank, end - count, end) for rank, count, end in found if count]


def _longest(shares: Sequence[int], seconds: Sequence[float]) -> float:
    return max(count * each for count, each in zip(shares, seconds, strict=True))


def _shortest(tasks: int, seconds: Sequence[float]) -> list[int]:
    """At least one task each, so that the longest share is as short as it can be."""
    bound = (tasks - len(seconds)) / sum(1 / each for each in seconds)
    shares = [max(1, int(bound / each)) for each in seconds]
    ends = [
        ((count + 1) * each, index) for index, (count, each) in enumerate(zip(shares, seconds, strict=True))
    ]
    heapq.heapify(ends)
    for _ in range(tasks - sum(shares)):
        end, index = ends[0]
        shares[index] += 1
        heapq.heapreplace(ends, (end + seconds[index], index))
    return shares


def check_workers(workers: Sequence[int | str] | None) -> None:
    """Check that it is ``None`` or a sequence of at least one rank or name."""
    if workers is not None and (isinstance(workers, str) or not isinstance(workers, Sequence)):
        raise TypeError(f"workers must be a sequence of ranks and names, got {workers!r}")
    if workers is not None and not workers:
        raise ValueError("workers must name at least one worker, got an empty sequence")


def ranks_of(workers: Sequence[int | str] | None) -> list[int]:
    """The ranks of these workers, in this order; ``None`` means all of the group."""
    if workers is None:
        return list(range(len(current_group().names)))
    return [get_worker_id(worker) for worker in workers]


def spread(tasks: int, ranks: Sequence[int]) -> list[int]:
    """The rank that runs each task: neighbouring tasks on one, and on each as many as on the others or one more."""
    used = min(len(ranks), tasks)
    return [ranks[task * used // tasks] for task in range(tasks)]


def even_share(size: int, parts: int, index: int) -> tuple[int, int]:
    """The half-open range of part ``index`` of ``size`` items in ``parts`` whose sizes differ by at most one."""
    share, rest = divmod(size, parts)
    start = index * share + min(index, rest)
    return start, start + share + (index < rest)
