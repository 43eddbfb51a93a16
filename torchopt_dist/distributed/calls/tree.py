"""Workers, their machines, ``fan_out`` → a tree in which each worker forwards to at most ``fan_out`` children.

A worker that has a message forwards it to one child after another, and so do the children that have it already. So in
each round every worker that has it and may have another child gets one, and the first child of a worker has the most
workers below it. Without ``fan_out`` this is the binomial tree, with log2 of the number of workers as its rounds; with
it there are a few rounds more, and no worker sends the message more than ``fan_out`` times.

A machine is entered once: the tree first reaches one worker of each machine, and from there the machine's others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

__all__ = ["Twig", "tree"]


class Twig(NamedTuple):
    """A worker in a tree, and its children, in the order in which it sends to them."""

    worker: int
    twigs: tuple[Twig, ...]


def tree(root: int, workers: Iterable[int], hosts: Sequence[str], fan_out: int) -> tuple[Twig, ...]:
    """The children of ``root`` in a tree of these workers; none, ``root`` included, has more than ``fan_out``.

    ``hosts`` are the names of the workers' machines, by rank.
    """
    machines: dict[str, list[int]] = {hosts[root]: [root]}
    for worker in workers:
        machines.setdefault(hosts[worker], []).append(worker)
    children: dict[int, list[int]] = {root: []}
    if fan_out == 1:  # a chain has no room for a machine's others beside the next machine
        _grow(children, [root], [rank for ranks in machines.values() for rank in ranks][1:], lambda _: 1)
    else:
        first = [ranks[0] for ranks in machines.values()]
        alone = {ranks[0] for ranks in machines.values() if len(ranks) == 1}
        _grow(children, [root], first[1:], lambda rank: fan_out - (rank not in alone))
        for head, *rest in machines.values():
            _grow(children, [head], rest, lambda _: fan_out)

    def twigs(of: int) -> tuple[Twig, ...]:
        return tuple(Twig(worker, twigs(worker)) for worker in children[of])

    return twigs(root)


def _grow(
    children: dict[int, list[int]], having: list[int], without: Sequence[int], room: Callable[[int], int]
) -> None:
    left = deque(without)
    while left:
        for worker in having[:]:
            if left and len(children[worker]) < room(worker):
                child = left.popleft()
                children[worker].append(child)
                children[child] = []
                having.append(child)
