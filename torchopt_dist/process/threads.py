"""Work → a thread that is free, or a new one; there is no limit, so work that waits for other work never deadlocks."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch

from torchopt_dist.pickling.serialized_exception import SerializedException
from torchopt_dist.process.future import Future

__all__ = ["ThreadPool", "settle_by", "settle_in_thread", "when_late"]

IDLE_SECONDS = 1.0
"""How long a thread without work is kept for the next."""

_Work: TypeAlias = Callable[[], None]
_Unsettled: TypeAlias = Future[Any] | torch.futures.Future[Any]


class ThreadPool:
    """Daemon threads; unlike an executor's they do not delay the interpreter's end.

    The thread that became free last gets the next work, with its caches and its memory, so threads that a burst of work
    has started end again. Each calls ``prepare`` once before its next work, for settings that belong to a thread.
    """

    def __init__(self, idle_seconds: float = IDLE_SECONDS) -> None:
        self.prepare: Callable[[], None] | None = None
        self._idle_seconds = idle_seconds
        self._free: list[queue.SimpleQueue[_Work | None]] = []
        self._closed = False
        self._working = 0
        self._lock = threading.RLock()  # whose methods, unlike a condition variable's, are not Python code
        self._changed = threading.Condition(self._lock)
        self._thread = threading.local()
        self._threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()

    def run(self, work: _Work) -> None:
        """Run ``work``, which must not raise, in a thread of its own, and return at once."""
        with self._lock:
            free = self._free.pop() if self._free else None
            self._working += 1
        # A thread keeps its arguments to its end. Were the work among them, its tensors would be kept, too, and freed
        # while the interpreter ends perhaps, which aborts the process.
        place = queue.SimpleQueue[_Work | None]() if free is None else free
        place.put(work)
        if free is None:
            thread = threading.Thread(target=self._loop, args=(place,), name="todist-work", daemon=True)
            thread.start()
            with self._lock:
                self._threads.add(thread)

    def prepare_this(self) -> None:
        """Apply the settings to this thread; for work that began before they were known."""
        prepare = self.prepare
        if prepare is not None and prepare is not getattr(self._thread, "prepared", None):
            self._thread.prepared = prepare
            prepare()

    def close(self, seconds: float = 0.0) -> None:
        """End the threads, each when its work is done, and wait at most so long; threads of later work end after it.

        A daemon thread that is still in C++ code of torch, such as a future's ``set_result``, when the interpreter ends
        aborts the process; see ``life/interruption.py``.
        """
        end = time.monotonic() + seconds
        with self._lock:
            self._closed = True
            free, self._free = self._free, []
        for each in free:
            each.put(None)
        with self._lock:
            self._changed.wait_for(lambda: not self._working, seconds)
        for thread in self.alive():
            left = end - time.monotonic()
            if left > 0 and thread is not threading.current_thread():
                thread.join(left)

    def alive(self) -> list[threading.Thread]:
        """The threads that have not ended."""
        with self._lock:
            return [thread for thread in self._threads if thread.is_alive()]

    def _loop(self, own: queue.SimpleQueue[_Work | None]) -> None:
        work = own.get()
        while work is not None:
            self.prepare_this()
            work()
            del work
            with self._lock:
                self._working -= 1
                if self._closed:
                    self._changed.notify_all()
                    return
                self._free.append(own)
            work = self._next(own)

    def _next(self, own: queue.SimpleQueue[_Work | None]) -> _Work | None:
        try:
            return own.get(timeout=self._idle_seconds)
        except queue.Empty:
            with self._lock:
                if own in self._free:
                    self._free.remove(own)
                    return None
            return own.get()  # it was given work just now


def settle_by(work: Callable[[], Any], future: _Unsettled, name: str | None = None) -> None:
    """Run ``work`` in this thread; the future gets what it returns or raises, with a worker's ``name`` even an exit."""
    unsettled = [future]
    del future  # the exception refers to this frame, and the future to the exception
    try:
        result = work()
    except Exception as error:
        unsettled.pop().set_exception(error)
    except BaseException as error:
        if name is None:
            raise
        unsettled.pop().set_exception(SerializedException.of(error).to_error(name))
    else:
        unsettled.pop().set_result(result)


def settle_in_thread(threads: ThreadPool, work: Callable[[], Any], future: _Unsettled, name: str) -> None:
    """Run ``work`` in a thread of its own; see :func:`settle_by`."""
    threads.run(partial(settle_by, work, future, name))


def when_late(future: Future[Any], seconds: float, ring: Callable[[], object]) -> None:
    """Call ``ring`` in a thread if the future is not settled in so many seconds."""
    timer = threading.Timer(seconds, ring)
    timer.daemon = True
    timer.start()
    future.add_done_callback(lambda _: timer.cancel())
