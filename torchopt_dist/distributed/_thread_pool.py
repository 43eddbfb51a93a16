"""Work → a thread that is free, or a new one. There are as many as there is work that waits, so it never deadlocks."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

__all__ = ["InlineExecutor", "run_in_thread"]


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


class InlineExecutor:
    """Runs work in the threads that bring it, as long as not too many of these are lent out.

    Args:
        limit: how many threads may be busy with work at a time; more work runs in threads of its own.
    """

    def __init__(self, limit: int) -> None:
        self._places = threading.Semaphore(limit)

    def run(self, work: Callable[[], None]) -> None:
        """Run ``work``, which must not raise: at once in the calling thread, or in another one."""
        if not self._places.acquire(blocking=False):
            run_in_thread(work)
            return
        try:
            work()
        finally:
            self._places.release()
