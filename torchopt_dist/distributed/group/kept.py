"""Key → what a worker keeps between calls: graphs, values that were put there, mirrors. Others hold the keys."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from torchopt_dist.distributed.messages.requests import BACKWARD_TWICE, Key

__all__ = ["HeldLeaf", "Kept", "KeptGraph", "graph_missing"]

GIVEN_UP = 1 << 12
"""How many keys are remembered that were released before their graphs were there. Most never come: a function has
raised an error, or another worker was sooner done."""

T = TypeVar("T")


class Kept(Generic[T]):
    """What a worker keeps, by key, until it is released or its owner is gone; all of it ends with the worker's group.

    ``missing`` makes the error for a key under which nothing is kept; ``has_gone`` tells whether the process that has
    made a key is known to have ended, so that it releases nothing any more.
    """

    def __init__(
        self, missing: Callable[[], Exception], has_gone: Callable[[Key], bool] = lambda _: False
    ) -> None:
        self._missing = missing
        self._has_gone = has_gone
        self._kept: dict[Key, T] = {}
        self._given_up: dict[Key, None] = {}  # the last ones, the oldest first
        self._lock = threading.RLock()  # a finalizer may release a key while its thread is at work here

    def __len__(self) -> int:
        return len(self._kept)

    def values(self) -> list[T]:
        """All that is kept."""
        with self._lock:
            return list(self._kept.values())

    def keep(self, key: Key, value: T) -> None:
        """Keep a value, unless its key was released, or its owner was lost, before the value was there."""
        with self._lock:
            if key in self._given_up:
                del self._given_up[key]
            elif not self._has_gone(key):
                self._kept[key] = value

    def find(self, key: Key) -> T:
        """What is kept under a key; raises the error of ``missing`` if there is nothing."""
        with self._lock:
            found = self._kept.get(key)
        if found is None:
            raise self._missing()
        return found

    def release(self, key: Key, *, coming: bool = False) -> T | None:
        """Forget what is kept under a key, and return it; ``coming``: also what is still to come."""
        with self._lock:
            found = self._kept.pop(key, None)
            if found is None and coming:
                self._given_up[key] = None
                if len(self._given_up) > GIVEN_UP:
                    del self._given_up[next(iter(self._given_up))]
        return found

    def forget_owner(self, rank: int) -> None:
        """Forget what a worker that is lost would have released."""
        with self._lock:
            for key in [key for key in self._kept if key[0] == rank]:
                del self._kept[key]

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._kept.clear()
            self._given_up.clear()


class HeldLeaf(NamedTuple):
    """Why the gradient of a graph's leaf stays on this worker: the leaf stands for a tensor of the mirror ``held``.

    ``hook`` is the index of the graph's input that the caller's graph has in its place, ``place`` that of the tensor
    in the mirror.
    """

    hook: int
    held: Any
    place: int


@dataclass
class KeptGraph:
    """The graph of a call, or of a backward that is itself to be differentiated.

    Attributes:
        inputs: its leaves, those of ``held`` the last.
        outputs: the tensors that were sent from it; ``None`` for one that a backward has used up.
        shared: whether the graph of a recorded backward has nodes in common with it. A backward through one of the two
            then retains these, whatever its caller asks; they are freed when both graphs are forgotten.
        end: a sequence number above those of its nodes.
        held: what the last leaves are whose gradients stay on this worker.
        within: makes the context of a backward.
    """

    inputs: list[torch.Tensor]
    outputs: list[Any]
    shared: bool = False
    end: int = 0
    held: Sequence[HeldLeaf] = ()
    within: Callable[[], AbstractContextManager[object]] = nullcontext

    def use_up(self, places: list[int]) -> bool:
        """Forget some outputs; returns whether these were the last."""
        for place in places:
            self.outputs[place] = None
        return all(output is None for output in self.outputs)


def graph_missing() -> Exception:
    """The error where a graph is not kept any more: backwards have used it up."""
    return RuntimeError(BACKWARD_TWICE)
