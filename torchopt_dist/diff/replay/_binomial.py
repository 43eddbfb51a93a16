"""Numbers of steps and of snapshots → where snapshots are taken, so that the fewest steps are run again.

Griewank and Walther, Algorithm 799: revolve, 2000: with ``c`` snapshots, that of the start included, and every step run
at most ``r`` times, ``C(c + r, c)`` steps can be reversed. In that paper the forward sweep ends before the last step.
Here it ends after it, since the outer loss comes next; that is one more step, with the outer loss as the last one.
"""

from __future__ import annotations

from math import comb

__all__ = ["places", "split", "steps_run_again"]


def _reach(snapshots: int, repetitions: int) -> int:
    return comb(snapshots + repetitions, snapshots) if repetitions >= 0 else 0


def _repetitions(steps: int, snapshots: int) -> int:
    repetitions = 0
    while _reach(snapshots, repetitions) < steps:
        repetitions += 1
    return repetitions


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
