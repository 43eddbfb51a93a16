"""Environment variables → this process's rank, the number of workers; what runs on some ranks, or waits for all.

The variables that torchrun sets are read at each call of these functions, never kept. Without them the world
is this one process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from numbers import Integral
from typing import Any, ParamSpec, TypeVar, overload

from torchopt_dist.distributed.group.group import current_group, find_group
from torchopt_dist.distributed.rendezvous.environment import WorldInfo, default_worker_name_format, read_world

__all__ = [
    "WorldInfo",
    "alive",
    "barrier",
    "default_worker_name_format",
    "get_local_rank",
    "get_local_world_size",
    "get_rank",
    "get_worker_id",
    "get_world_info",
    "get_world_size",
    "not_on_rank",
    "on_rank",
    "rank_non_zero_only",
    "rank_zero_only",
]


P = ParamSpec("P")
T = TypeVar("T")
CONNECTS = "_todist_connects"
"""The attribute, its ``worker_init_fn``, of a function that ``auto_init_rpc`` decorates, and of what decorates that."""
_NOT_GIVEN: Any = object()


def get_world_info() -> WorldInfo:
    """Read this process's place in the world from the environment.

    Returns:
        The world's and this machine's sizes and this worker's ranks. The name is this worker's in the RPC
        group; outside a group it is the default name.

    Raises:
        InitializationError: a variable is missing, is not a number, or is out of range.
    """
    world, group = read_world(), find_group()
    if group is None or world.rank >= len(group.names):
        return world
    return replace(world, worker_name=group.names[world.rank])


def alive() -> tuple[int, ...]:
    """The ranks of the group that have not been lost, this one among them.

    When a call has raised :class:`~torchopt_dist.errors.WorkerLostError` for a worker that died, its rank is missing
    here already. So ``dim_partitioner(workers=alive())`` calls the survivors only.

    Raises:
        NotInitializedError: there is no RPC group.
    """
    group = current_group()
    lost = group.lost
    return tuple(rank for rank in range(len(group.names)) if rank not in lost)


def get_rank() -> int:
    """This worker's rank among all workers, in ``[0, world_size)``."""
    return get_world_info().world_rank


def get_world_size() -> int:
    """The number of workers on all machines."""
    return get_world_info().world_size


def get_local_rank() -> int:
    """This worker's rank on its machine, in ``[0, local_world_size)``; choose the GPU by it."""
    return get_world_info().local_rank


def get_local_world_size() -> int:
    """The number of workers on this machine."""
    return get_world_info().local_world_size


def get_worker_id(id: str | int | None = None) -> int:
    """The rank of a worker.

    Args:
        id: a worker's name or rank; ``None`` means this worker.

    Raises:
        NotInitializedError: a name or a rank is given and there is no RPC group.
        ValueError: no worker has that name, or the rank is outside ``[0, world_size)``.
        TypeError: ``id`` is neither a name nor a rank.
    """
    if id is None:
        return get_rank()
    names = current_group().names
    if isinstance(id, str):
        if id not in names:
            raise ValueError(f"no worker is named {id!r}; the workers are {', '.join(names)}")
        return names.index(id)
    if isinstance(id, bool) or not isinstance(id, (int, Integral)):
        raise TypeError(
            f"a worker is given by its name or its rank, got {type(id).__name__} {' '.join(repr(id).split()):.200}"
        )
    if not 0 <= id < len(names):
        raise ValueError(f"a worker's rank must be in [0, {len(names)}), got {id}")
    return int(id)


def on_rank(*ranks: int) -> Callable[[Callable[P, T]], Callable[P, T | None]]:
    """Run the decorated function on the given ranks only; elsewhere it returns ``None`` at once.

    Args:
        ranks: the ranks, each at least 0.

    Raises:
        ValueError: a rank is negative, or, at the call, the world has none of the ranks, so that the function
            would run nowhere.
    """
    _check_ranks("on_rank", ranks)

    def runs_here(name: str) -> bool:
        world = get_world_info()
        if min(ranks) >= world.world_size:
            raise ValueError(
                f"on_rank{ranks}: `{name}` would run nowhere, since ranks must be in [0, {world.world_size})"
            )
        return world.rank in ranks

    return lambda func: _only_where(runs_here, func)


def not_on_rank(*ranks: int) -> Callable[[Callable[P, T]], Callable[P, T | None]]:
    """Run the decorated function on all but the given ranks; on those it returns ``None`` at once.

    Args:
        ranks: the ranks to leave out, each at least 0.

    Raises:
        ValueError: a rank is negative.
    """
    _check_ranks("not_on_rank", ranks)

    return lambda func: _only_where(lambda _: get_rank() not in ranks, func)


def _only_where(runs_here: Callable[[str], bool], func: Callable[P, T]) -> Callable[P, T | None]:
    """The function, which returns ``None`` where ``runs_here`` of its name is false."""
    if not callable(func):
        raise TypeError(f"func must be a function, got {type(func).__name__} {func!r}")

    @functools.wraps(func)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T | None:
        if hasattr(func, CONNECTS) and find_group() is None and get_world_size() > 1:
            raise TypeError(
                f"`{func.__qualname__}` must run on all ranks, which `auto_init_rpc` connects: write "
                "`@rank_zero_only`, and decorators like it, below `@auto_init_rpc(...)`"
            )
        return func(*args, **kwargs) if runs_here(func.__qualname__) else None

    return wrapped


def _check_ranks(decorator: str, ranks: tuple[Any, ...]) -> None:
    if not ranks:
        raise ValueError(f"{decorator} needs at least one rank")
    for rank in ranks:
        if callable(rank):
            raise TypeError(f"{decorator} needs ranks: write `@{decorator}(0)`, not `@{decorator}`")
        if isinstance(rank, bool) or not isinstance(rank, (int, Integral)):
            raise TypeError(f"{decorator}: a rank is an integer, got {type(rank).__name__} {rank!r}")
        if rank < 0:
            raise ValueError(f"{decorator}: a rank must be at least 0, got {rank}")


@overload
def rank_zero_only(func: Callable[P, T]) -> Callable[P, T | None]: ...


@overload
def rank_zero_only() -> Callable[[Callable[P, T]], Callable[P, T | None]]: ...


def rank_zero_only(func: Any = _NOT_GIVEN) -> Any:
    """Run the decorated function on rank 0 only; elsewhere it returns ``None`` at once.

    Args:
        func: the function; without it, as in ``@rank_zero_only()``, a decorator is returned.
    """
    return on_rank(0) if func is _NOT_GIVEN else on_rank(0)(func)


@overload
def rank_non_zero_only(func: Callable[P, T]) -> Callable[P, T | None]: ...


@overload
def rank_non_zero_only() -> Callable[[Callable[P, T]], Callable[P, T | None]]: ...


def rank_non_zero_only(func: Any = _NOT_GIVEN) -> Any:
    """Run the decorated function on every rank but 0; there it returns ``None`` at once.

    Args:
        func: the function; without it, as in ``@rank_non_zero_only()``, a decorator is returned.
    """
    return not_on_rank(0) if func is _NOT_GIVEN else not_on_rank(0)(func)


def barrier(worker_names: Iterable[str] | None = None) -> None:
    """Wait until every worker, or every named one, has called ``barrier`` with the same names.

    Args:
        worker_names: the workers to wait for, by name or rank, this one among them; ``None`` means all.

    Raises:
        NotInitializedError: there is no RPC group, or this process was forked from a worker of it.
        ValueError: a name is unknown, or this worker is not among them.
        PeerFailedError: another rank failed meanwhile.
        WorkerLostError: a worker that is waited for died.
    """
    group = current_group()
    group.check_process()
    if isinstance(worker_names, str):
        raise TypeError(
            f"worker_names must be a collection of names, got one string: write [{worker_names!r}]"
        )
    if not isinstance(worker_names, (Iterable, type(None))):
        raise TypeError(
            f"worker_names must be a collection of names, got {type(worker_names).__name__} {worker_names!r}"
        )
    chosen = range(len(group.names)) if worker_names is None else tuple(worker_names)
    if None in chosen:
        raise TypeError(f"worker_names must hold names, got None in {chosen}")
    ranks = [get_worker_id(name) for name in chosen]
    if group.rank not in ranks:
        raise ValueError(
            f"worker_names must contain the calling worker {group.names[group.rank]!r}, "
            f"got {[group.names[rank] for rank in ranks]}"
        )
    group.membership.barrier(ranks)
