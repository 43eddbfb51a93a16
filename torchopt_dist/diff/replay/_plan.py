"""Numbers of steps, of snapshots and of gradients → what a loop keeps of its steps, and the way back through them.

There are no tensors here. A *start* is what a step starts from; it is kept as a snapshot, or reached again: by the
gradients of the steps before, where these are kept, or by running these steps again, which evaluates the loss.

Griewank and Walther, Algorithm 799: revolve, 2000: with ``c`` snapshots, that of the start included, and every step run
at most ``r`` times, ``C(c + r, c)`` steps can be reversed. In that paper the forward sweep ends before the last step.
Here it ends after it, since the outer loss comes next; that is one more step, with the outer loss as the last one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

__all__ = ["Action", "Plan", "WayBack", "places", "split", "steps_run_again"]


class Action(NamedTuple):
    """One action on the way to the start of a step; ``at`` is the number of a step."""

    do: Literal["load", "move", "run", "keep", "drop"]
    """``load`` the start that is kept; ``move`` by the gradient that is kept, or ``run`` the step, to the start of the
    next one; ``keep`` the start that was reached; ``drop`` the one that was kept."""
    at: int


@dataclass(frozen=True)
class Plan:
    """What the steps of a loop leave for the way back."""

    snapshots: int
    """How many starts are kept at a time."""
    starts: frozenset[int]
    """The steps whose start is kept when they run first; 0 is one of them."""
    gradients: int = 0
    """Of so many first steps the gradients are kept."""
    last: bool = False
    """Whether that of the last step is kept, too, whichever it is: it makes room before there is need of it."""

    @staticmethod
    def of_all_gradients(steps: int) -> Plan:
        """No step is run again; so many steps share a snapshot, and have one each while they are gone back through."""
        spacing = math.isqrt(steps - 1) + 1
        starts = frozenset(range(0, steps, spacing))
        return Plan(len(starts) + spacing - 1, starts, steps)

    @staticmethod
    def of_snapshots(steps: int, snapshots: int, gradients: int = 0) -> Plan:
        """So many snapshots, where the fewest steps are run again; beside them, so many gradients."""
        known = max(0, gradients - 1)
        beyond = {known + place for place in places(steps - known, snapshots) if place}
        return Plan(snapshots, frozenset({0, *beyond}), known, gradients > 0)

    @staticmethod
    def of_memory(steps: int, budget: int, snapshot: int, gradient: int) -> Plan:
        """Share a budget among snapshots and gradients, which take so much each, for the fewest evaluations.

        Without room for all, the gradients of the last step and of the first ones are kept: the first ones are needed
        again and again. Their starts are reached from the first one by moves, so these are not many.
        """
        plan = Plan.of_all_gradients(steps)
        if budget >= steps * gradient + plan.snapshots * snapshot:
            return plan
        best = (steps * steps, 1, 0)
        for snapshots in range(1, min(steps, budget // snapshot) + 1):
            most = 1 + min(2 * math.isqrt(steps), 200)
            gradients = min((budget - snapshots * snapshot) // gradient, most, steps)
            rest = steps - max(0, gradients - 1)
            evaluations = steps_run_again(rest, snapshots) + rest - (gradients > 0)
            best = min(best, (evaluations, snapshots, gradients))
        return Plan.of_snapshots(steps, *best[1:])


class WayBack:
    """The way back through the first steps of a plan, from the last of them to the first.

    Args:
        plan: the plan.
        steps: how many steps were run.
    """

    def __init__(self, plan: Plan, steps: int) -> None:
        self._plan = plan
        self._kept = sorted(start for start in plan.starts if start < steps)

    def to(self, number: int) -> list[Action]:
        """The actions that lead to the start of a step, from nowhere; the next step that is asked for is before it."""
        made: list[Action] = []
        while self._kept[-1] > number:
            made.append(Action("drop", self._kept.pop()))
        at = self._kept[-1]
        made.append(Action("load", at))
        if at == number:
            made.append(Action("drop", self._kept.pop()))
            return made
        if number <= self._plan.gradients:
            return made + self._by_gradients(at, number)
        while at < self._plan.gradients:
            made.append(Action("move", at))
            at += 1
        return made + self._by_running(at, number)

    def _by_gradients(self, at: int, number: int) -> list[Action]:
        """Keep the last starts on the way, as many as there is room for."""
        made = []
        room = self._plan.snapshots - len(self._kept)
        for step in range(at, number):
            if step > at and step >= number - room:
                made.append(self._keep(step))
            made.append(Action("move", step))
        return made

    def _by_running(self, at: int, number: int) -> list[Action]:
        """Keep starts where the fewest steps are run again on the way back to here."""
        made = []
        rest, room = number + 1 - at, self._plan.snapshots - len(self._kept) + 1
        while at < number:
            ahead = split(rest, room) if room > 1 else rest - 1
            made += [Action("run", step) for step in range(at, at + ahead)]
            at, rest, room = at + ahead, rest - ahead, room - 1
            if at < number:
                made.append(self._keep(at))
        return made

    def _keep(self, at: int) -> Action:
        self._kept.append(at)
        return Action("keep", at)


def split(steps: int, snapshots: int) -> int:
    """The best number of steps between the start and the next snapshot; both numbers must be at least 2."""
    r = _repetitions(steps, snapshots)
    least = max(1, _reach(snapshots, r - 2), steps - _reach(snapshots - 1, r))
    return min(least, steps - 1)


def places(steps: int, snapshots: int) -> list[int]:
    """The steps before which the first sweep takes a snapshot; the first is 0."""
    found, rest = [0], steps + 1
    while len(found) < snapshots and rest > 1:
        ahead = split(rest, snapshots - len(found) + 1)
        found.append(found[-1] + ahead)
        rest -= ahead
    return [place for place in found if place < max(1, steps)]


def steps_run_again(steps: int, snapshots: int) -> int:
    """The least number of steps that have to be run again, only to return to a snapshot's place."""
    r = _repetitions(steps + 1, snapshots)
    return r * (steps + 1) - _reach(snapshots + 1, r - 1) - steps


def _repetitions(steps: int, snapshots: int) -> int:
    repetitions = 0
    while _reach(snapshots, repetitions) < steps:
        repetitions += 1
    return repetitions


def _reach(snapshots: int, repetitions: int) -> int:
    return math.comb(snapshots + repetitions, snapshots) if repetitions >= 0 else 0
