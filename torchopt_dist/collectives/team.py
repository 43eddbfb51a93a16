"""A thread → the team of workers for which it computes: a team of one, unless a call with ``team=`` says otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torchopt_dist.torch_private import asking_thread

__all__ = ["Team", "in_team", "team"]


@dataclass(frozen=True)
class Team:
    """The workers that run one task together, as one of them sees it; from :func:`team`.

    ``todist.DataParallel(team)``, ``todist.mean_over(x, team)`` and ``todist.vary_over(x, team)`` take it as a group.

    Attributes:
        rank: this worker's place in the team, in ``[0, size)``.
        size: how many workers the team has.
        group: their process group; ``None`` for a team of one.
    """

    rank: int = 0
    size: int = 1
    group: Any = None


_ALONE = Team()
_teams: dict[object, Team] = {}


def team() -> Team:
    """The team that runs the present task: inside a function that is called with ``team=``, that of this worker.

    Everywhere else it is a team of one, so that a function runs in one process as it does on a team. A thread that the
    function starts itself is elsewhere.

    Example:
        >>> team = todist.team()  # doctest: +SKIP
        >>> x, y = x[team.rank :: team.size], y[team.rank :: team.size]  # this worker's part # doctest: +SKIP
        >>> adapted = todist.inner_loop(..., parallel=todist.DataParallel(team))  # doctest: +SKIP
        >>> return todist.mean_over(loss(adapted, x, y), team)  # doctest: +SKIP
    """
    return _teams.get(asking_thread(), _ALONE) if _teams else _ALONE


@contextmanager
def in_team(of: Team) -> Iterator[None]:
    """A context in which this thread, and the engine's that it asks for a backward pass, compute for a team."""
    thread = asking_thread()
    before = _teams.get(thread)
    _teams[thread] = of
    try:
        yield
    finally:
        if before is None:
            del _teams[thread]
        else:
            _teams[thread] = before
