"""Workers → the process group that they enter together, whose waits end when one of them is lost; that of a team.

All members begin a request together. One that raises an error tells the others, which may wait for it in a collective;
the first one also tells those that are still at work when it is done.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeAlias

import torch.distributed as dist

from torchopt_dist.collectives.team import Team, in_team
from torchopt_dist.collectives.watched_group import (
    CONNECT_SECONDS,
    LEFT_SECONDS,
    WatchedGroup,
    registered,
    watched_group,
)
from torchopt_dist.core.random_turns import lent
from torchopt_dist.distributed.calls.futures import gather
from torchopt_dist.distributed.group.group import Group, answering_group
from torchopt_dist.errors import CollectiveError, WorkerLostError
from torchopt_dist.process import network
from torchopt_dist.process.future import Future, as_completed
from torchopt_dist.process.threads import settle_in_thread

__all__ = ["Ranks", "as_member", "beside", "check_of", "connected", "end_with", "meet", "tell_late"]


Enter: TypeAlias = Callable[..., object]
"""A function of a module: ``enter(group, store, ranks, *args)`` makes this worker's part of the process group."""


def meet(group: Group, ranks: Sequence[int], enter: Enter, *args: Any, seconds: float) -> None:
    """Let workers enter a process group, this one among them, whose store they use.

    Args:
        group: the workers that there are.
        ranks: those that enter, in ascending order.
        enter: enters; it is called on each of them.
        args: its further arguments.
        seconds: how long they may take.
    """
    started = time.monotonic()
    host = network.local_address(os.environ.get("MASTER_ADDR", "127.0.0.1"))
    store = _store_at(host, 0, seconds, is_master=True)
    others = [rank for rank in ranks if rank != group.rank]
    entered = {
        rank: group.ask(rank, _enter, host, store.port, seconds, ranks, enter, args) for rank in others
    }
    entered[group.rank] = beside(group, partial(enter, group, store, ranks, *args))
    gather(entered, group.names, seconds, started)


def beside(group: Group, work: Callable[[], object]) -> Future[list[Any]]:
    """Do work in another thread that waits in C++ for workers, since one of them may be lost meanwhile."""
    future: Future[list[Any]] = Future()
    settle_in_thread(group.threads, work, future, group.names[group.rank])
    return future


def check_of(group: Group, ranks: Sequence[int]) -> Callable[[], None]:
    """A function that raises :class:`WorkerLostError` if one of these workers is lost."""

    def check() -> None:
        for rank in ranks:
            if rank in group.membership.failures:
                raise group.membership.loss_of(rank)

    return check


def _enter(host: str, port: int, seconds: float, ranks: Sequence[int], enter: Enter, args: Any) -> None:
    """On another worker: enter the process group."""
    enter(answering_group(), _store_at(host, port, seconds, is_master=False), ranks, *args)


def _store_at(host: str, port: int, seconds: float, *, is_master: bool) -> dist.TCPStore:
    """Where the workers meet; the one that asks the others keeps it."""
    limit = timedelta(seconds=seconds)
    return dist.TCPStore(host, port, None, is_master=is_master, wait_for_workers=False, timeout=limit)


Ranks = tuple[int, ...]
"""Of the members of a team, in ascending order; the first one is asked, and asks the others."""


def connected(group: Group, ranks: Ranks) -> WatchedGroup:
    """The process group of a team whose first worker this one is."""
    known: WatchedGroup | None = group.teams.get(ranks)
    if known is not None and not known.has_failed:
        return known
    meet(group, ranks, _enter_team, next(group.numbers), seconds=CONNECT_SECONDS)
    made: WatchedGroup = group.teams[ranks]
    return made


def _enter_team(group: Group, store: dist.Store, ranks: Ranks, number: int) -> None:
    earlier = group.teams.pop(ranks, None)
    if earlier is not None:
        dist.destroy_process_group(earlier)
    check = check_of(group, ranks)
    group.teams[ranks] = registered(ranks, lambda rank, size: watched_group(rank, size, number, store, check))


@contextmanager
def as_member(made: WatchedGroup, ranks: Ranks) -> Iterator[None]:
    """A context in which this worker computes for a team; an error ends the team's collectives on all members."""
    group = answering_group()
    if made.has_failed:
        raise CollectiveError(
            "a member of the team that made this graph has raised an error since: call the function again"
        )
    made.begin()
    try:
        with in_team(Team(made.rank(), made.size(), made)):
            yield
    except BaseException:
        made.fail()
        for rank in ranks:
            if rank != group.rank and rank not in group.membership.failures:
                with suppress(Exception):  # what has gone wrong is told otherwise
                    group.ask(rank, _note_failed, ranks, made.number)
        raise


def end_with(made: WatchedGroup, request: int, reply: Future[list[Any]]) -> None:
    """Note that another member is done, or has no value and so ends all collectives."""
    if reply.exception() is None:
        made.leave(request)
    else:
        made.fail()


def tell_late(values: dict[int, Future[list[Any]]], ranks: Ranks, made: WatchedGroup, group: Group) -> None:
    """Tell members that are still at work that this one is done, as they may wait for it in vain."""
    if values[group.rank].exception() is not None:
        return
    with lent():
        deque(as_completed([values[rank] for rank in ranks[1:]], LEFT_SECONDS), maxlen=0)
    late = [rank for rank in ranks[1:] if not values[rank].done()]
    told = {rank: group.ask(rank, _note_left, ranks, made.number) for rank in late}
    with suppress(WorkerLostError):  # so is its value
        gather(told, group.names)


def _note_failed(ranks: Ranks, number: int) -> None:
    """On another member: one has raised an error."""
    made: WatchedGroup | None = answering_group().teams.get(ranks)
    if made is not None and made.number == number:
        made.fail()


def _note_left(ranks: Ranks, number: int) -> None:
    """On another member: the first one is done."""
    made: WatchedGroup | None = answering_group().teams.get(ranks)
    if made is not None and made.number == number:
        made.leave(made.request)
