"""Steps, and how many starts can be kept → how many steps are recorded together, and how many lie between starts."""

from __future__ import annotations

import math

from torch import Tensor

from torchopt_dist.core.graphs import nodes_between
from torchopt_dist.torch_private import bytes_of_results

__all__ = ["lengths", "unit_of"]

SMALL = 1 << 24
"""Bytes of recorded steps that are no matter: so many steps as these are recorded together."""
OF_LOSS = 4
"""The graph of a recorded step takes about so many times that of its loss."""


def lengths(units: int, slots: int, *, again: bool) -> list[int]:
    """How many units each segment has, the first one first, so that the fewest steps are run again.

    Args:
        units: how many there are.
        slots: how many starts can be kept, that of the first segment among them. The segments have one less from each
            to the next.
        again: whether the last segment is gone through at once, as one unit that needs no slot.
    """
    slots = min(slots, units)
    r = 1
    while math.comb(slots + r, slots) - (not again) < units:
        r += 1
    least = [math.comb(left + r - 2, left) for left in range(slots, 0, -1)]
    most = [math.comb(left + r - 1, left) for left in range(slots, 0, -1)]
    rest = units - again - sum(least)
    for place in reversed(range(slots)):
        more = min(max(rest, 0), most[place] - least[place])
        least[place] += more
        rest -= more
    for place in range(slots):  # where there are fewer units than the least
        less = min(max(-rest, 0), least[place])
        least[place] -= less
        rest += less
    return [*least, *[1] * again]


def unit_of(loss: Tensor, own: int, steps: int) -> int:
    """How many steps are recorded together: one, or a few that are small.

    Args:
        loss: that of a step, with its graph.
        own: how many bytes the tensors take that a step starts from.
        steps: how many steps the loop has.
    """
    graph = sum(map(bytes_of_results, nodes_between([loss], [])))
    return max(1, min(SMALL // max(1, OF_LOSS * (graph + own)), math.isqrt(steps)))
