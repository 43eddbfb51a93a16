"""The payloads of a call → whether a tree pays, and one in which each worker forwards to at most ``fan_out`` children.

A worker that has a message forwards it to one child after another, and so do the children that have it already. So in
each round every worker that has it and may have another child gets one, and the first child of a worker has the most
workers below it. Without ``fan_out`` this is the binomial tree, with log2 of the number of workers as its rounds; with
it there are a few rounds more, and no worker sends the message more than ``fan_out`` times.

A machine is entered once: the tree first reaches one worker of each machine, and from there the machine's others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from torchopt_dist.distributed.group.group import Group
from torchopt_dist.distributed.messages.payload import Payload

__all__ = ["Twig", "common", "fan_out_for", "tree"]

AUTO_FAN_OUT = 3
"""Of little: a tree of three children is at most a tenth slower than one without a limit, up to a thousand workers."""
AUTO_FAN_OUT_OF_MUCH = 2
"""Of much: the line of a worker with children is the bound, which carries all of it to each child."""
MUCH_BYTES = 1 << 22
"""From here on the deeper tree is sooner done, with 8 workers and with a thousand."""
AUTO_WORKERS = 4
"""On other machines: in one machine memory is copied, and a tree copies as much, a third of it one after another."""
AUTO_BYTES = 1 << 20
"""Two chunks: with less there is nothing to hand on while the rest comes."""


def common(held: Sequence[Iterable[Tensor]]) -> list[Tensor]:
    """The tensors that all have in common, in the order of the first."""
    ids = set.intersection(*({id(tensor) for tensor in tensors} for tensors in held))
    return list({id(tensor): tensor for tensor in held[0] if id(tensor) in ids}.values())


def fan_out_for(group: Group, payloads: Mapping[int, Payload]) -> int:
    """How many children a worker has in the tree for a call; 0 if there is to be none."""
    workers = [worker for worker in payloads if worker not in group.membership.failures]
    if len(workers) < 2:
        return 0
    options = payloads[workers[0]].options
    if options.fan_out is None:
        return 0
    fan_out = options.fan_out
    if fan_out == "auto":
        if options.outlives_workers:  # after a loss, only a star's sums have the same bits
            return 0
        fan_out = AUTO_FAN_OUT
        here = group.members[group.rank].host
        if sum(group.members[worker].host != here for worker in workers) < AUTO_WORKERS:
            return 0
        shared = sum(x.nbytes for x in common([payloads[worker].tensors() for worker in workers[:2]]))
        if shared < AUTO_BYTES:
            return 0
        if shared >= MUCH_BYTES:
            fan_out = AUTO_FAN_OUT_OF_MUCH
    return fan_out if len(workers) > fan_out else 0


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
