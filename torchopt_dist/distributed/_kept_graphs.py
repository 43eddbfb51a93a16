"""Key → the graph that a worker keeps between a call and its backward; the caller's graph holds the key."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from torchopt_dist.distributed._protocol import BACKWARD_TWICE, Key
from torchopt_dist.distributed._replicas import Home

__all__ = ["KeptGraph", "KeptGraphs"]

GIVEN_UP = 1 << 12
"""How many keys are remembered of graphs that were released before they were there. Most never come: a function has
raised an error, or another worker was sooner done."""


@dataclass
class KeptGraph:
    """The graph of a call, or of a backward that is itself to be differentiated.

    Attributes:
        inputs: its leaves.
        outputs: the tensors that were sent from it; ``None`` for one that a backward has used up.
        shared: whether the graph of a recorded backward has nodes in common with it. A backward through one of the two
            must then retain the nodes for the other, whatever its caller asks; the nodes are freed when both graphs are
            forgotten.
        end: a sequence number above those of its nodes.
        homes: for the places of inputs whose gradients stay on this worker, the replica and the place there.
    """

    inputs: list[torch.Tensor]
    outputs: list[Any]
    shared: bool = False
    end: int = 0
    homes: Mapping[int, Home] = field(default_factory=dict)


class KeptGraphs:
    """The graphs of the calls that a worker has answered, by key.

    Args:
        known: the attribute of that name; a new set if not given.
        has_gone: whether the process that has made a key is known to have ended, so that it releases nothing any more.

    Attributes:
        known: the functions whose results have been checked for lost gradients.
    """

    def __init__(
        self, known: set[object] | None = None, has_gone: Callable[[Key], bool] = lambda _: False
    ) -> None:
        self._has_gone = has_gone
        self.known = set() if known is None else known
        self._graphs: dict[Key, KeptGraph] = {}
        self._given_up: dict[Key, None] = {}  # the last ones, the oldest first
        self._lock = threading.RLock()  # a finalizer may release a graph while its thread is at work here

    def __len__(self) -> int:
        return len(self._graphs)

    def keep(self, key: Key, graph: KeptGraph) -> None:
        """Keep a graph, unless its caller has stopped waiting for it, or was lost before the graph was there."""
        with self._lock:
            if key in self._given_up:
                del self._given_up[key]
            elif not self._has_gone(key):
                self._graphs[key] = graph

    def find(self, key: Key) -> KeptGraph:
        """The graph under a key.

        Raises:
            RuntimeError: a backward has used it up.
        """
        with self._lock:
            graph = self._graphs.get(key)
        if graph is None:
            raise RuntimeError(BACKWARD_TWICE)
        return graph

    def use_up(self, key: Key, graph: KeptGraph, places: list[int]) -> None:
        """Forget some outputs of a graph, and with the last of them the graph."""
        with self._lock:
            for place in places:
                graph.outputs[place] = None
            if all(output is None for output in graph.outputs):
                self._graphs.pop(key, None)

    def release(self, key: Key) -> None:
        """Forget a graph, also a future one, of a call whose caller has stopped waiting."""
        with self._lock:
            if self._graphs.pop(key, None) is None:
                self._given_up[key] = None
                if len(self._given_up) > GIVEN_UP:
                    del self._given_up[next(iter(self._given_up))]

    def forget_caller(self, rank: int) -> None:
        """Forget the graphs of a caller that is lost, since it releases none."""
        with self._lock:
            for key in [key for key in self._graphs if key[0] == rank]:
                del self._graphs[key]

    def clear(self) -> None:
        """Forget all graphs."""
        with self._lock:
            self._graphs.clear()
            self._given_up.clear()
