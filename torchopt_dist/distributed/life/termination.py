"""SIGTERM, which schedulers send some time before they kill → ``SystemExit`` in ``main``, so that it can still save.

Whoever sends SIGTERM decides how long ``main`` has: nothing here ends it earlier once its ``finally`` blocks run.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

from torchopt_dist.distributed.life.interruption import Interruption
from torchopt_dist.process.signals import INTERRUPT, TERMINATED

__all__ = ["LAST_SECONDS", "Termination"]

LAST_SECONDS = 600.0
"""How long a rank that was told to end waits for rank 0, at most. Who has told them to end kills both before that."""


class Termination:
    """Context manager, in the thread that runs ``main``: meanwhile SIGTERM raises there, once, when it can.

    Programs that handle SIGTERM themselves are left alone, and so are the workers of a launch, which their agent
    interrupts, and a ``main`` in another thread than Python's first one, which alone handles signals.

    Attributes:
        told: whether SIGTERM has come.
        waits: whether the thread may be interrupted where it does not run ``main``, since it waits for the others.
    """

    def __init__(self, interruption: Interruption, unwound: threading.Event) -> None:
        self.told, self.waits = False, True
        self._interruption, self._unwound = interruption, unwound
        self._pid = 0

    def __enter__(self) -> None:
        in_first = threading.current_thread() is threading.main_thread()
        defaults = all(signal.getsignal(each) is signal.SIG_DFL for each in (signal.SIGTERM, INTERRUPT))
        if in_first and defaults:
            self._pid = os.getpid()
            signal.signal(signal.SIGTERM, self._handle)

    def __exit__(self, *_: object) -> None:
        if self._pid and signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def check(self) -> None:
        """Raise now, if it could not be done in ``main``."""
        if self.told:
            raise SystemExit(TERMINATED)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a process that was forked from this one
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if self.told:
            return
        self.told = True
        if self._interruption.can_raise() if self._interruption.runs_main else self.waits:
            raise SystemExit(TERMINATED)
        if self._interruption.runs_main:
            threading.Thread(target=self._raise_later, name="todist-terminate", daemon=True).start()

    def _raise_later(self) -> None:
        self._interruption.raise_later(SystemExit(TERMINATED), self._unwound)
