"""The error that ends a rank → reports for the other ranks, for torchrun and for the reader of the output."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path

from torchopt_dist.errors import PeerFailedError, WorkerLostError
from torchopt_dist.pickling.tracebacks import format_error, show_user_frames, summary
from torchopt_dist.process.signals import TERMINATED
from torchopt_dist.torch_private import set_cpp_log_level

__all__ = ["CppWarnings", "one_line", "report", "tell_torchrun", "tell_user"]


ERRORS_ONLY = 2


class CppWarnings:
    """The warnings of torch's C++ code, which prints one for each connection that ends while a group fails."""

    def __init__(self) -> None:
        self._before: int | None = None

    def silence(self) -> None:
        """Print none of them, unless the user has set ``TORCH_CPP_LOG_LEVEL``."""
        if self._before is None and "TORCH_CPP_LOG_LEVEL" not in os.environ:
            self._before = set_cpp_log_level(ERRORS_ONLY)

    def restore(self) -> None:
        """Print them again."""
        if self._before is not None:
            set_cpp_log_level(self._before)
            self._before = None


def report(error: BaseException) -> tuple[str, str]:
    """The report for the other ranks: a traceback, or an exit code, since a parser that exits has printed the reason.

    The second text is a summary in one line.
    """
    if isinstance(error, SystemExit):
        return (f"SystemExit: {error.code}" + (", on SIGTERM" if error.code == TERMINATED else ""),) * 2
    return format_error(error), summary(error)


def one_line(error: Exception) -> str:
    """Another rank's failure in one line; that rank prints its whole traceback."""
    text = error.summary if isinstance(error, PeerFailedError) and error.summary else str(error)
    return text.partition("\n")[0]


def tell_user(error: BaseException) -> None:
    """Print the error when it ends the program, with the user's frames, on one rank only.

    torchrun ends all ranks as soon as one has ended, perhaps before the failed one has printed its error: so under it
    this is printed at once, and torchrun is told that it was the first error.
    """
    consequence = isinstance(error, (PeerFailedError, WorkerLostError))
    if consequence or not isinstance(error, Exception) or _error_file() is None:
        if consequence and isinstance(error, Exception):
            tell_torchrun(one_line(error))
        show_user_frames()
        return
    print(format_error(error), end="", file=sys.stderr, flush=True)
    show_user_frames(told=error)
    tell_torchrun(summary(error), root_cause=True)


def tell_torchrun(text: str, *, root_cause: bool = False) -> None:
    """Write the reason for the end of this rank into torchrun's file, if there is one.

    torchrun shows the ranks that have ended by then, and calls the earliest the root cause; a rank that ends because
    another one failed may be the only one.
    """
    file = _error_file()
    if file is not None and not file.exists():  # else the program's own `record` has told more
        timestamp = int(time.time()) - root_cause  # torchrun counts whole seconds
        entry = {
            "message": {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(timestamp)}}
        }
        with contextlib.suppress(OSError):
            file.write_text(json.dumps(entry), encoding="utf-8")


def _error_file() -> Path | None:
    """The file in which torchrun reads the reason; this package's launcher gets exceptions directly and has none."""
    name = os.environ.get("TORCHELASTIC_ERROR_FILE", "/dev/null")
    return None if name.startswith(("/dev/", "/proc/")) else Path(name)
