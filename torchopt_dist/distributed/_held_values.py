"""Key → what a worker holds for calls until it is freed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from torchopt_dist.distributed._protocol import Key
from torchopt_dist.errors import ResidentError

__all__ = ["HeldValues"]


class _HasTensors(Protocol):
    @property
    def tensors(self) -> Sequence[Tensor]:
        """The tensors that are held."""


T = TypeVar("T", bound=_HasTensors)


class HeldValues(Generic[T]):
    """What a worker holds, by key; all of it ends with the worker's group.

    Args:
        freed: the message of the error for a key that is not here.
    """

    def __init__(self, freed: str) -> None:
        self._freed = freed
        self._held: dict[Key, T] = {}
        self._lock = threading.RLock()  # a finalizer may free a value while its thread is at work here

    def __len__(self) -> int:
        return len(self._held)

    def nbytes(self) -> int:
        """How many bytes all tensors take."""
        with self._lock:
            held = list(self._held.values())
        return sum(tensor.nbytes for each in held for tensor in each.tensors)

    def hold(self, key: Key, value: T) -> None:
        """Hold a value under a key."""
        with self._lock:
            self._held[key] = value

    def held(self, key: Key) -> T:
        """What is held under a key.

        Raises:
            ResidentError: there is nothing.
        """
        found = self._held.get(key)
        if found is None:
            raise ResidentError(self._freed)
        return found

    def forget(self, key: Key) -> T | None:
        """Free what is held under a key, and return it; ``None`` if there is nothing."""
        with self._lock:
            return self._held.pop(key, None)

    def forget_home(self, rank: int) -> None:
        """Free what was put on a worker that is lost, since it frees nothing."""
        with self._lock:
            for key in [key for key in self._held if key[0] == rank]:
                del self._held[key]

    def clear(self) -> None:
        """Free everything."""
        with self._lock:
            self._held.clear()
