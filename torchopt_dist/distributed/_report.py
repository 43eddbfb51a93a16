"""The error that ends a rank → what the other ranks, torchrun, and the readers of the output are told of it."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path

from torchopt_dist._tracebacks import format_error, show_user_frames, summary
from torchopt_dist.errors import PeerFailedError, WorkerLostError

__all__ = ["one_line", "report", "tell_user"]


def report(error: BaseException) -> tuple[str, str]:
    """What the other ranks are told: a traceback, and the same in one line.

    Of a ``SystemExit`` that is the code, for a parser that refuses arguments has printed why.
    """
    if isinstance(error, SystemExit):
        return (f"SystemExit: {error.code}",) * 2
    return format_error(error), summary(error)


def one_line(error: Exception) -> str:
    """Another rank's failure as its own rank, which prints the whole, is not there to tell it."""
    return error.summary if isinstance(error, PeerFailedError) and error.summary else str(error)


def tell_user(error: BaseException) -> None:
    """Have the error printed where it ends the program, with the user's frames, and by one rank only.

    torchrun ends all ranks as soon as one of them has ended, perhaps before the one that failed has printed why. So
    under torchrun an error is printed at once, and torchrun is told that it was the first one.
    """
    name = os.environ.get("TORCHELASTIC_ERROR_FILE", "/dev/null")
    elsewhere = name.startswith(("/dev/", "/proc/"))  # our own launcher reads what its workers raise
    consequence = isinstance(error, (PeerFailedError, WorkerLostError))
    if elsewhere or consequence or not isinstance(error, Exception):
        show_user_frames()
        return
    print(format_error(error), end="", file=sys.stderr, flush=True)
    show_user_frames(told=error)
    file = Path(name)
    if not file.exists():  # else the program's own `record` has told more
        # torchrun counts whole seconds, and takes the earliest failure for the root cause.
        extra = {"py_callstack": summary(error), "timestamp": str(int(time.time()) - 1)}
        entry = {"message": {"message": summary(error), "extraInfo": extra}}
        with contextlib.suppress(OSError):
            file.write_text(json.dumps(entry), encoding="utf-8")
