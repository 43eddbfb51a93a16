"""A call with ``team=`` → a call of each team's first worker, which calls the others: a team is a call that calls.

The first worker gets all tasks of its team as one task. It sends them to the other members, computes them itself, and
checks that all have the same values. It does so for one request at a time, so that all members run the collectives of
their team in one order, forward and backward.

The members' values are one value, so each gets 1/n of its gradient, and the gradients that come back are added up. Let
``F = mean_r F_r`` be the value, where member r computes ``F_r`` and ``mean_over`` takes the mean, whose gradient passes
to each member unchanged: the sum is ``sum_r dF_r / n = dF``. Where a gradient is averaged over the members already, as
an inner loop with ``DataParallel`` does, each member gives ``dF / n``, and the sum is ``dF`` again.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, Self, TypeAlias

import torch
import torch.distributed as dist

from torchopt_dist.collectives.team import team
from torchopt_dist.collectives.watched_group import WatchedGroup
from torchopt_dist.core.random_turns import draw_seed_returnable, lent, seed_of_task
from torchopt_dist.core.types import Args, KwArgs
from torchopt_dist.distributed._process_groups import Ranks, as_member, connected, end_with, tell_late
from torchopt_dist.distributed.balance import spread as spread_evenly
from torchopt_dist.distributed.calls import spread
from torchopt_dist.distributed.calls.futures import gather
from torchopt_dist.distributed.calls.siblings import Siblings
from torchopt_dist.distributed.group.group import Group, answering_group
from torchopt_dist.distributed.messages.caller_state import CallerState
from torchopt_dist.distributed.messages.payload import ExecutionOptions, Payload, Surrounded
from torchopt_dist.distributed.partition import (
    Partition,
    Partitioner,
    TensorDimensionPartitioner,
    dim_partitioner,
    partition,
)
from torchopt_dist.distributed.reduce import check_reducer
from torchopt_dist.distributed.worker import execute
from torchopt_dist.distributed.worker.one_value import one_value
from torchopt_dist.errors import CollectiveError
from torchopt_dist.process.future import Future
from torchopt_dist.process.threads import settle_by

__all__ = ["TeamSize", "check_team", "on_teams"]

TeamSize: TypeAlias = "int | dist.DeviceMesh | None"
"""How many workers run a task together, or a mesh whose last dimension they are."""
_Reducer: TypeAlias = Callable[..., Any]

_REFUSED = (
    (("retries", "hedge_after"), "a team's workers need each other, so none runs a share of another"),
    (("vectorize", "chunk_size", "compile"), "a team runs its tasks one after another, as they are"),
    (("isolate_own_share",), "all members of a team compute on tensors of their own"),
    (("progress",), "the members of a team report no tasks"),
    (("fan_out",), "the first worker of a team hands on what it gets"),
    (("buffers",), "each member of a team has buffers of its own"),
)
"""Options that a call with ``team`` does not take, and why."""


def check_team(
    size: Any, options: ExecutionOptions, buffers: object = None, partitioner: object = None
) -> None:
    """Raise an error if the argument ``team`` is wrong, or an option does not go with it."""
    if size is None:
        return
    if not isinstance(size, dist.DeviceMesh):
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(
                f"`team` must be a number of workers or a DeviceMesh, got {type(size).__name__} {size!r:.80}"
            )
        if size < 1:
            raise ValueError(f"`team` must be at least 1, got {size}")
    given = {**vars(options), "buffers": buffers}
    usual = {**vars(ExecutionOptions()), "buffers": None}
    for name, why in ((name, why) for names, why in _REFUSED for name in names):
        if given[name] != usual[name] and given[name] is not None:
            raise ValueError(f"`{name}` must be left out with `team`, got {name}={given[name]!r}: {why}")
    if getattr(partitioner, "balance", None) is not None:
        raise ValueError("`balance` must be left out with `team`: the members of a team wait for each other")


def on_teams(
    func: Callable[..., Any],
    partitioner: Partitioner | None,
    reducer: _Reducer | None,
    size: int | dist.DeviceMesh,
    options: ExecutionOptions,
    group: Group,
) -> tuple[Callable[..., Any], Partitioner | None, _Reducer | None, ExecutionOptions]:
    """The function, partitioner, reducer and options of the call that a call on teams is.

    Raises :class:`ValueError` if the workers cannot be divided into teams, and :class:`RuntimeError` if they have no
    process group, or if a team makes the call.
    """
    if team().size > 1:
        raise RuntimeError(
            "a function that a team runs must not call with `team`: the team is at work already"
        )
    teams = _teams_of(size, group)
    if len(teams[0]) == 1:
        return func, partitioner, reducer, options
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() != len(group.names):
        raise RuntimeError(
            "`team` needs a process group of all workers: use todist.auto_init_rpc(process_group='gloo'), or start the "
            "program by todist.launch(..., backend='gloo', rpc=True)"
        )
    return (
        _First(func, teams=teams, options=replace(options, fan_out=None)),
        _OntoTeams(partitioner, teams),
        functools.partial(_reduced, None if reducer is None else check_reducer(reducer)),
        replace(options, fan_out=None),
    )


def _teams_of(size: int | dist.DeviceMesh, group: Group) -> list[Ranks]:
    """The ranks of each team, in ascending order; in a world of one process it is a team of one."""
    workers = len(group.names)
    if workers == 1:
        return [(0,)]
    if not isinstance(size, int):
        rows = size.mesh.reshape(-1, size.mesh.shape[-1]).tolist()
        if max(max(row) for row in rows) >= workers:
            raise ValueError(f"`team` must be a mesh of the {workers} workers, got ranks {rows}")
        return [tuple(sorted(row)) for row in rows]
    if workers % size:
        raise ValueError(f"`team` must divide the number of workers, which is {workers}, got {size}")
    return [tuple(range(first, first + size)) for first in range(0, workers, size)]


class _Tasks:
    """The tasks of one team, opaque, so that a handle among their arguments is resolved by each member itself.

    ``share`` is the number of this share in the call; ``places`` and ``sizes`` are the tasks' places and sizes there.
    """

    def __init__(self, share: int) -> None:
        self.share = share
        self.tasks: list[tuple[Args, KwArgs]] = []
        self.places: list[int] = []
        self.sizes: list[int] = []


@dataclass(frozen=True)
class _OntoTeams:
    """Arguments → a partition for each team's first worker, with all tasks of the team."""

    partitioner: Partitioner | None
    teams: list[Ranks]

    def __call__(self, *args: Any, **kwargs: Any) -> list[Partition]:
        given = dim_partitioner() if self.partitioner is None else self.partitioner
        if isinstance(given, TensorDimensionPartitioner) and given.workers is None:
            given = copy.copy(given)
            given.workers = tuple(ranks[0] for ranks in self.teams)
        parts = partition(given, args, kwargs)
        of_rank = {rank: ranks for ranks in self.teams for rank in ranks}
        anywhere = spread_evenly(len(parts), range(len(self.teams)))
        shares: dict[Ranks, _Tasks] = {}
        for place, part in enumerate(parts):
            ranks = self.teams[anywhere[place]] if part.movable else of_rank.get(int(part.worker))
            if ranks is None:
                raise ValueError(f"a task's worker must be in a team of {self.teams}, got rank {part.worker}")
            share = shares.setdefault(ranks, _Tasks(len(shares)))
            share.tasks.append((part.args, part.kwargs))
            share.places.append(place)
            share.sizes.append(part.size)
        return [Partition(ranks[0], (share,), None) for ranks, share in shares.items()]


def _reduced(reduce: _Reducer | None, results: list[list[tuple[int, int, Any]]]) -> Any:
    """The values of all teams' tasks, in the tasks' order, or what the caller's reducer makes of them."""
    found = sorted((each for result in results for each in result), key=itemgetter(0))
    values = [value for _, _, value in found]
    return values if reduce is None else reduce(values, [size for _, size, _ in found])


class _OfTeam(functools.partial, Surrounded):  # type: ignore[type-arg]
    """A function that a team runs, on one of its members; in messages it has its own name."""

    def __new__(cls, func: Callable[..., Any], **attributes: Any) -> Self:
        self = super().__new__(cls, func)
        names = {name: getattr(func, name) for name in ("__name__", "__qualname__") if hasattr(func, name)}
        vars(self).update(attributes, **names)
        return self


class _Member(_OfTeam):
    """The function on a member of the team, by its ranks and the number of its process group."""

    ranks: Ranks
    number: int
    made: WatchedGroup | None = None

    @contextmanager
    def within(self) -> Iterator[None]:
        """See :class:`Surrounded`."""
        if self.made is None:
            self.made = answering_group().teams.get(self.ranks)
        if self.made is None or self.made.number != self.number:
            raise CollectiveError("the process group of this team has been replaced by another one")
        with as_member(self.made, self.ranks):
            yield


class _First(_OfTeam):
    """What the first worker of each of the ``teams`` runs."""

    teams: list[Ranks]
    options: ExecutionOptions
    made: WatchedGroup | None = None

    def __call__(self, share: _Tasks) -> list[tuple[int, int, Any]]:
        """Run the tasks of a share with the other members; returns each one's place, size and value."""
        group, made = answering_group(), self.made
        assert made is not None
        ranks = self._ranks(group)
        # As without teams: a task's seed does not depend on where it runs.
        first_seed = seed_of_task() - share.share
        seeds = tuple(first_seed + place for place in share.places)
        function = _Member(self.func, ranks=ranks, number=made.number)
        payload = Payload(function, tuple(share.tasks), seeds, CallerState.capture(), self.options)
        siblings = Siblings(group, 0.0, torch.is_grad_enabled(), self.options)
        modules: dict[Any, Any] = {}
        values: dict[int, Future[list[Any]]] = {group.rank: Future()}
        for rank in ranks[1:]:
            values[rank] = spread.call(siblings, rank, payload, modules)
            values[rank].add_done_callback(functools.partial(end_with, made, made.request))
        _, settle_seed = draw_seed_returnable()

        def own() -> list[Any]:
            ran = execute.run(payload)
            siblings.drew |= ran.drew
            return ran.values

        settle_by(own, values[group.rank])
        tell_late(values, ranks, made, group)
        found = _gathered(values, group)
        settle_seed(siblings.drew)
        columns = zip(*(found[rank] for rank in ranks), strict=True)
        return [
            (place, size, one_value(members, ranks))
            for place, size, members in zip(share.places, share.sizes, columns, strict=True)
        ]

    @contextmanager
    def within(self) -> Iterator[None]:
        """See :class:`Surrounded`."""
        group = answering_group()
        if not group.leading.acquire(blocking=False):
            with lent():
                group.leading.acquire()
        try:
            if self.made is None:
                self.made = connected(group, self._ranks(group))
            with as_member(self.made, self._ranks(group)):
                yield
        finally:
            group.leading.release()

    def _ranks(self, group: Group) -> Ranks:
        return next(ranks for ranks in self.teams if ranks[0] == group.rank)


def _gathered(values: dict[int, Future[list[Any]]], group: Group) -> dict[int, list[Any]]:
    """The values of all members; an error that others only followed is raised if there is no other one."""
    try:
        return gather(values, group.names)
    except CollectiveError:
        errors = [value.exception() for value in values.values() if value.done()]
        for error in errors:
            if error is not None and not isinstance(error, CollectiveError):
                raise error from None
        raise
