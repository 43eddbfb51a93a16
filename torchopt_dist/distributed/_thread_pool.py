"""Work → a thread that is free, or a new one. Work that waits for other work never deadlocks."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

__all__ = ["InlineExecutor", "ThreadPool"]


class ThreadPool:
    """Daemon threads, each kept for the next work; unlike an executor's they do not delay the interpreter's end."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._free = 0
        self._closed = False
        self._lock = threading.Lock()

    def run(self, work: Callable[[], None]) -> None:
        """Run ``work``, which must not raise, in a thread of its own, and return at once."""
        with self._lock:
            start = self._free == 0
            if not start:
                self._free -= 1
        self._work.put(work)
        if start:
            threading.Thread(target=self._loop, name="todist-work", daemon=True).start()

    def close(self) -> None:
        """End the threads, those that work when their work is done. Later work runs in threads that end after it."""
        with self._lock:
            self._closed = True
            free, self._free = self._free, 0
        for _ in range(free):
            self._work.put(None)

    def _loop(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            with self._lock:
                if self._closed:
                    return
                self._free += 1


class InlineExecutor:
    """Runs work in the threads that bring it, as long as not too many of them are busy with work.

    Args:
        limit: how many threads may be busy with work at a time.
        pool: runs the work beyond that.
    """

    def __init__(self, limit: int, pool: ThreadPool) -> None:
        self._places = threading.Semaphore(limit)
        self._pool = pool

    def run(self, work: Callable[[], None]) -> None:
        """Run ``work``, which must not raise: at once in the calling thread, or in another one."""
        if not self._places.acquire(blocking=False):
            self._pool.run(work)
            return
        try:
            work()
        finally:
            self._places.release()
