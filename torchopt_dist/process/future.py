"""A result that is to come → threads that wait for it, and functions that are called when it is there.

This is a ``concurrent.futures.Future`` without what a call does not need: cancelling, and a condition variable, whose
locks are taken by Python code. A small call has several futures, and those of the standard library took a fifth of the
functions that it calls.
"""

from __future__ import annotations

import logging
import queue
import time
from _thread import allocate_lock
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

__all__ = ["Future", "as_completed"]

T = TypeVar("T")

log = logging.getLogger(__name__)


class Future(Generic[T]):
    """A result that is to come."""

    __slots__ = ("__weakref__", "_callbacks", "_done", "_error", "_result", "_settled", "_waiting")

    _result: T

    def __init__(self) -> None:
        self._done = False
        self._error: BaseException | None = None
        self._settled = allocate_lock()  # taken by the first result, and never released
        self._callbacks: deque[Callable[[Future[T]], object]] = deque()
        self._waiting: deque[Callable[[], object]] = deque()

    def done(self) -> bool:
        """Whether the result, or an exception instead, is there."""
        return self._done

    def set_result(self, result: T) -> bool:
        """Set the result; returns ``False``, and does nothing, if there is one or an exception already."""
        if not self._settled.acquire(False):
            return False
        self._result = result
        self._tell()
        return True

    def set_exception(self, error: BaseException) -> bool:
        """Set an exception in the place of the result; returns what :meth:`set_result` returns."""
        if not self._settled.acquire(False):
            return False
        self._error = error
        self._tell()
        return True

    def result(self, seconds: float | None = None) -> T:
        """Wait for the result; raises the exception, if there is one instead, or ``TimeoutError`` after ``seconds``."""
        error = self._error if self._done else self.exception(seconds)
        if error is None:
            return self._result
        try:
            raise error
        finally:
            del error, self  # the exception refers to this frame

    def exception(self, seconds: float | None = None) -> BaseException | None:
        """Wait as :meth:`result` does; returns the exception, if there is one instead of a result."""
        if not self._done:
            arrival = allocate_lock()
            arrival.acquire()
            self._waiting.append(arrival.release)
            if not self._done:  # otherwise the result has come just now, and maybe nobody has seen the lock
                arrival.acquire(timeout=-1.0 if seconds is None else seconds)
                if not self._done:
                    raise TimeoutError(f"there is no result after {seconds:g} s")
        return self._error

    def add_done_callback(self, function: Callable[[Future[T]], object]) -> None:
        """Call ``function`` with this future when the result is there: in the thread that sets it, or now.

        Threads that wait for the result go on afterwards; an exception of ``function`` is logged.
        """
        self._callbacks.append(function)
        if self._done:
            self._call()

    def _tell(self) -> None:
        self._done = True
        if self._callbacks:
            self._call()
        while self._waiting:
            self._waiting.popleft()()

    def _call(self) -> None:
        """Call each function once. Another thread may do the same for one that it has just added."""
        while self._callbacks:
            try:
                function = self._callbacks.popleft()
            except IndexError:
                return
            try:
                function(self)
            except Exception:
                log.exception("a function that was called with a result has raised")


def as_completed(futures: Iterable[Future[T]], seconds: float | None = None) -> Iterator[Future[T]]:
    """The futures, each as soon as its result is there; those that take longer than ``seconds`` are left out."""
    end = None if seconds is None else time.monotonic() + seconds
    arrived: queue.SimpleQueue[Future[T]] = queue.SimpleQueue()
    count = 0
    for future in futures:
        future.add_done_callback(arrived.put)
        count += 1
    for _ in range(count):
        try:
            yield arrived.get(timeout=None if end is None else max(0.0, end - time.monotonic()))
        except queue.Empty:
            return
