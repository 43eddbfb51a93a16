"""Work → a thread that is free, or a new one. There are as many as there is work that waits, so it never deadlocks."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

__all__ = ["run_in_thread"]


class _Threads:
    """Daemon threads that are kept for the next work; unlike an executor's they do not hold the interpreter's end."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._free = 0
        self._lock = threading.Lock()

    def run(self, work: Callable[[], None]) -> None:
        with self._lock:
            start = self._free == 0
            if not start:
                self._free -= 1
        self._work.put(work)
        if start:
            threading.Thread(target=self._loop, name="todist-work", daemon=True).start()

    def _loop(self) -> None:
        while True:
            self._work.get()()
            with self._lock:
                self._free += 1


_threads = _Threads()


def run_in_thread(work: Callable[[], None]) -> None:
    """Run ``work``, which must not raise, in a thread of its own, and return at once."""
    _threads.run(work)
