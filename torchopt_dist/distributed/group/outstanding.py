"""A thread that sends requests and does not wait for the replies → at most so many under way, and then it waits.

A worker answers each request in a thread, and an asynchronous call has one here, so their number must have a bound. It
holds for who sends, ``main`` or a task, and not for a process: a task of a nested call waits for calls of its own only,
and these end without it, so that no two can wait for each other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from torchopt_dist.core.random_turns import lent
from torchopt_dist.errors import CallTimeoutError

__all__ = ["Outstanding"]

LIMIT = 256
"""How many requests may be under way."""
LIMIT_OF_A_WORKER = 8
"""The same for each worker, where that is more."""


class Outstanding(threading.local):
    """The requests under way of what runs in this thread, in a group of this size.

    ``slots`` are those left, ``None`` if nothing has been sent yet; a thread that begins to run something else sets
    it so.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self.slots: threading.Semaphore | None = None

    def wait_for_slot(self, seconds: float) -> Callable[..., None]:
        """Wait until a request may be sent; returns a function to be called when it is answered.

        Raises :class:`CallTimeoutError` if no earlier request is answered in so many seconds; 0 means no limit.
        """
        limit = max(LIMIT, LIMIT_OF_A_WORKER * self._size)
        slots = self.slots = self.slots or threading.Semaphore(limit)
        if not slots.acquire(blocking=False):
            with lent():
                if not slots.acquire(timeout=seconds or None):
                    raise CallTimeoutError(
                        f"{limit} requests of this thread are under way, the most at a time, and none of them "
                        f"has been answered within timeout={seconds:g} s"
                    )
        return lambda _=None: slots.release()
