"""The process that has started this worker → a call when it has ended, so that no worker is left behind."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

__all__ = ["ParentWatch"]


class ParentWatch:
    """Context manager that calls ``orphaned``, in a thread of its own, when torchrun's agent or a launcher has ended.

    Other parents, such as a shell, may end before the program. The signal that the kernel sends when a parent dies
    would come when the parent's *thread* ends that has started this process, and leave ``main`` no time for ``finally``
    blocks.
    """

    def __init__(self, interval: float, orphaned: Callable[[], None]) -> None:
        self._interval = interval
        self._orphaned = orphaned
        self._left = threading.Event()
        self._parent = os.getppid()

    def __enter__(self) -> None:
        if "TORCHELASTIC_RUN_ID" in os.environ:
            threading.Thread(target=self._watch, name="todist-parent", daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self._left.set()

    def _watch(self) -> None:
        while not self._left.wait(self._interval):
            if os.getppid() != self._parent:
                self._orphaned()
                return
