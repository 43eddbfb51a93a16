"""Messages → each handled by the thread that has received it, while another one receives if that takes long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from torchopt_dist.process.threads import ThreadPool

__all__ = ["Receiver"]

SHORT_SECONDS = 3e-4
"""Less than this a short message takes. To wake another thread for the next one takes a good part of it."""
SHORT_IN_A_ROW = 8
"""After so many short messages the next one is taken for short, too."""
TICK_SECONDS = 2e-3
"""After this time, at the latest after twice this time, another thread receives if a message was not short."""

IDLE_TICKS = 25
"""After so many ticks without a message the keeper sleeps, and the next message has to wake it."""

M = TypeVar("M")


class Receiver(Generic[M]):
    """The role of receiving, which one thread at a time has; ``receive`` returns ``None`` at the end.

    A thread that has received a message handles it. If the last messages took little time, it keeps the role meanwhile,
    so that no other thread is woken; else another one gets the role at once. It gives the role away before it waits for
    a message itself, as in a nested call; and the keeper, a timer thread, takes it away when the message takes longer
    than expected.
    """

    def __init__(
        self,
        receive: Callable[[], M | None],
        handle: Callable[[M], None],
        threads: ThreadPool,
        ended: Callable[[], None],
    ) -> None:
        self._receive = receive
        self._handle = handle
        self._threads = threads
        self._ended = ended
        self._lock = threading.Lock()
        self._handler: int | None = None  # the thread that handles a message and keeps the role
        self._kept = 0  # how many messages have been handled so
        self._short = 0  # how many messages in a row have been short
        self._keeps_time = threading.Event()
        self._has_ended = False

    def start(self) -> None:
        """Receive from now on."""
        self._threads.run(self._keep_time)
        self._threads.run(self._work)

    def about_to_wait(self) -> None:
        """Let another thread receive, if this one has the role: it is going to wait for a message itself."""
        if self._handler == threading.get_ident():
            self._hand_on(self._kept)

    def _work(self) -> None:
        while (message := self._receive()) is not None:
            self._threads.prepare_this()
            if self._short < SHORT_IN_A_ROW:
                self._threads.run(self._work)
                self._timed(message)
                return
            me = threading.get_ident()
            with self._lock:
                self._handler = me
                self._kept += 1
                mine = self._kept
                if not self._keeps_time.is_set():
                    self._keeps_time.set()
            self._timed(message)
            del message
            with self._lock:
                if self._handler != me or self._kept != mine:
                    return  # another thread has the role
                self._handler = None
        with self._lock:
            self._has_ended = True
            self._keeps_time.set()
        self._ended()

    def _timed(self, message: M) -> None:
        began = time.perf_counter()
        self._handle(message)
        self._short = self._short + 1 if time.perf_counter() - began < SHORT_SECONDS else 0

    def _hand_on(self, number: int) -> None:
        """Let another thread receive, unless the message with that number has been handled."""
        with self._lock:
            if self._handler is None or self._kept != number:
                return
            self._handler = None
        self._threads.run(self._work)

    def _keep_time(self) -> None:
        idle = 0
        while not self._has_ended:
            self._keeps_time.wait()
            seen = self._kept
            time.sleep(TICK_SECONDS)
            idle = idle + 1 if seen == self._kept else 0
            if idle:
                self._hand_on(seen)
            if idle >= IDLE_TICKS:
                with self._lock:
                    if seen == self._kept and not self._has_ended:
                        self._keeps_time.clear()  # until there is the next message
