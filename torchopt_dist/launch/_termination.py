"""SIGTERM while a launch runs → its workers are ended in order, and then the signal ends the program.

By itself the signal would end the launcher at once, and who has sent it, such as SLURM or a container's runtime, kills
what a program leaves behind. Ctrl-C needs nothing of the kind: Python raises :class:`KeyboardInterrupt`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

__all__ = ["ended_in_order"]


class _Terminated(SystemExit):
    """Raised where SIGTERM finds the main thread.

    It goes on if the signal then does not end the program, which is so for the first process of a container.
    """


@contextlib.contextmanager
def ended_in_order() -> Iterator[None]:
    """Have SIGTERM raise within, and end this process when that has come through.

    Python handles signals in the main thread. Launches in other threads are left alone, and so are programs that handle
    SIGTERM themselves.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    pid = os.getpid()

    def handle(number: int, frame: FrameType | None) -> None:
        if os.getpid() == pid:
            raise _Terminated(128 + number)
        _end_by(number)  # a process that another thread has forked meanwhile

    try:
        signal.signal(signal.SIGTERM, handle)
        yield
    except _Terminated:
        _end_by(signal.SIGTERM)
        raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _end_by(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
