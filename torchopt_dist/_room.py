"""Work that must compute alone, a guest, and other work → who may compute now, in the threads of one process.

Work that waits leaves the room meanwhile. So all work of a process goes on, whatever it waits for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["Room"]

PATIENCE = 600.0
"""Seconds that work waits for other work, if this process computes all the time."""
SHORT_PATIENCE = 5.0
"""Seconds that it waits, if this process seems to wait itself, in a way that is not known here."""
QUIET = 0.1
"""The part of one core's time under which it seems so."""


class Room:
    """The work that computes: a guest alone, or any other work.

    Attributes:
        guest: the guest that computes, if there is one.
    """

    def __init__(self) -> None:
        self.guest: object | None = None
        self._inside: list[object] = []
        self._changed = threading.Condition(threading.Lock())
        self._crowd = 0  # how many threads wait

    def enter(self, work: object, *, guest: bool, instead_of: object | None = None) -> None:
        """Begin to compute, or go on; waits until that is possible, or nothing seems to happen any more.

        Args:
            work: whoever is to compute.
            guest: whether it computes alone.
            instead_of: who is inside, and has it computed.
        """
        with self._changed:
            if guest or self.guest is not None:
                self._wait(
                    lambda: (
                        self.guest in (None, instead_of)
                        and not (guest and any(each is not instead_of for each in self._inside))
                    )
                )
            if instead_of in self._inside:
                self._inside.remove(instead_of)
            self._inside.append(work)
            if guest:
                self.guest = work

    def leave(self, work: object, *, back: object | None = None) -> None:
        """End to compute, or pause.

        Args:
            work: who has computed.
            back: who goes on in its place.
        """
        with self._changed:
            if work in self._inside:  # unless it was interrupted when it was to go on
                self._inside.remove(work)
            if back is not None:
                self._inside.append(back)
            if self.guest is work:
                self.guest = back
            if self._crowd:
                self._changed.notify_all()

    def wait_for_guest(self) -> None:
        """Wait until no guest computes."""
        with self._changed:
            self._wait(lambda: self.guest is None)

    def _wait(self, is_free: Callable[[], bool]) -> None:
        until = time.monotonic() + PATIENCE
        computed = time.process_time()
        self._crowd += 1
        try:
            while not self._changed.wait_for(is_free, min(SHORT_PATIENCE, until - time.monotonic())):
                before, computed = computed, time.process_time()
                if computed - before < QUIET * SHORT_PATIENCE or time.monotonic() >= until:
                    return
        finally:
            self._crowd -= 1
