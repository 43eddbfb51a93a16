"""The workers of a team → their process group; what its first worker and the others tell each other of it.

All members begin a request together. One that raises an error tells the others, which may wait for it in a collective;
the first one also tells those that are still at work when it is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

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
from torchopt_dist.distributed._meeting import check_of, meet
from torchopt_dist.distributed.calls.gather import gather
from torchopt_dist.distributed.group.group import Group, answering_group
from torchopt_dist.errors import CollectiveError, WorkerLostError
from torchopt_dist.process.future import Future, as_completed

__all__ = ["Ranks", "as_member", "connected", "end_with", "tell_late"]

Ranks = tuple[int, ...]
"""Of the members of a team, in ascending order; the first one is asked, and asks the others."""


def connected(group: Group, ranks: Ranks) -> WatchedGroup:
    """The process group of a team whose first worker this one is."""
    known: WatchedGroup | None = group.teams.get(ranks)
    if known is not None and not known.has_failed:
        return known
    meet(group, ranks, _enter, next(group.numbers), seconds=CONNECT_SECONDS)
    made: WatchedGroup = group.teams[ranks]
    return made


def _enter(group: Group, store: dist.Store, ranks: Ranks, number: int) -> None:
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
