"""Workers, a number of tasks → the worker of each task, and the range of each part."""

from __future__ import annotations

from collections.abc import Sequence

from torchopt_dist.distributed._group import current_group
from torchopt_dist.distributed.world import get_worker_id

__all__ = ["check_workers", "even_share", "ranks_of", "spread"]


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
