"""The key of a share → a context in which no other thread runs the same share.

A share is sent again if the worker that has forwarded it is lost, and may still be running then. Two runs at a time
would draw from one random generator.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torchopt_dist.distributed._protocol import Key

__all__ = ["RunningShares"]


class RunningShares:
    """The shares that run on a worker."""

    def __init__(self) -> None:
        self._keys: set[Key] = set()
        self._changed = threading.Condition()

    @contextmanager
    def alone(self, key: Key, about_to_wait: Callable[[], None]) -> Iterator[None]:
        """A context in which this thread runs a share; first waits for the end of another run of the share.

        Args:
            key: of the share.
            about_to_wait: called before a wait.
        """
        with self._changed:
            if key in self._keys:
                about_to_wait()
                self._changed.wait_for(lambda: key not in self._keys)
            self._keys.add(key)
        try:
            yield
        finally:
            with self._changed:
                self._keys.remove(key)
                self._changed.notify_all()
