"""The operations of a deep graph that Python has walked through → the same, freed without overflowing the stack."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from torch.autograd.graph import Node

__all__ = ["make_freeable"]

STRIDE = 1000
"""How many operations deep a graph may be freed by recursion."""


def make_freeable(nodes: list[Node]) -> None:
    """Let a deep graph be freed, whenever that will be, without overflowing the stack.

    Torch 2.13 frees a graph that Python has walked through by recursion, and some 30,000 operations deep the
    process dies. So each ``STRIDE``-th level gets a :class:`_Link`, which ends the recursion.
    """
    if len(nodes) <= STRIDE:
        return
    sources = {node: [source for source, _ in node.next_functions if source is not None] for node in nodes}
    users = Counter(source for node in nodes for source in sources[node])
    level = dict.fromkeys(nodes, 0)
    ready = [node for node in nodes if not users[node]]
    while ready:
        node = ready.pop()
        for source in sources[node]:
            level[source] = max(level[source], level[node] + 1)
            users[source] -= 1
            if not users[source]:
                ready.append(source)
    for node in nodes:
        below = [source for source in sources[node] if level[source] // STRIDE > level[node] // STRIDE]
        if below:
            metadata: Any = node.metadata  # torch's annotation says method, but it is a property
            metadata["torchopt_dist.visual"] = _Link(below)


class _Freeing(threading.local):
    def __init__(self) -> None:
        self.waiting: list[Node] = []
        self.under_way = False


_FREEING = _Freeing()


class _Link:
    """Holds operations for the one that uses them; when that is freed they are freed in a loop."""

    def __init__(self, below: list[Node]) -> None:
        self._below = below

    # A default is still there when modules are taken down.
    def __del__(self, freeing: _Freeing = _FREEING) -> None:
        freeing.waiting += self._below
        self._below = []
        if freeing.under_way:
            return  # the loop is further up the stack
        freeing.under_way = True
        while freeing.waiting:
            freeing.waiting.pop()
        freeing.under_way = False
