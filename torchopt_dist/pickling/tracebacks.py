"""An exception → its text, with the frames of the user's program and without those that called it.

``TODIST_DEBUG=1`` shows all frames.
"""

from __future__ import annotations

import os
import sys
import traceback
from types import TracebackType

from torchopt_dist.errors import PeerFailedError, TodistError, WorkerLostError

__all__ = ["format_error", "from_user_code", "show_user_frames", "summary"]

HIDDEN = tuple(
    os.path.join(os.path.dirname(os.path.dirname(__file__)), room, "")
    for room in ("arguments", "distributed", "launching", "process")
)
"""The folders whose functions call a user's functions."""
LONGEST = 500
"""Characters of a message in a summary."""


def from_user_code(frames: TracebackType | None) -> TracebackType | None:
    """The frames of an exception, without those before the first one in the user's code."""
    while (
        frames is not None and frames.tb_next is not None and _is_hidden(frames.tb_frame.f_code.co_filename)
    ):
        frames = frames.tb_next
    return frames


def format_error(error: BaseException) -> str:
    """The traceback of an exception and of its causes, as Python prints it, with the user's frames.

    The frames that called the user's code are left out. The frame that raised stays, unless the message is enough by
    itself, as that of a ``TodistError`` is.
    """
    told = traceback.TracebackException.from_exception(error)
    if not _is_debugging():
        _hide_frames(told, error)
    return "".join(told.format())


def _hide_frames(told: traceback.TracebackException, error: BaseException) -> None:
    shown = [frame for frame in told.stack if not _is_hidden(frame.filename)]
    if told.stack and _is_hidden(told.stack[-1].filename) and not isinstance(error, TodistError):
        shown.append(told.stack[-1])
    told.stack = traceback.StackSummary.from_list(shown)
    for part, of in ((told.__cause__, error.__cause__), (told.__context__, error.__context__)):
        if part is not None and of is not None:
            _hide_frames(part, of)
    if isinstance(error, BaseExceptionGroup):
        for part, of in zip(told.exceptions or (), error.exceptions, strict=False):
            _hide_frames(part, of)


def _is_hidden(filename: str) -> bool:
    return filename.startswith(HIDDEN)


def _is_debugging() -> bool:
    return os.environ.get("TODIST_DEBUG", "0") not in ("", "0")


def summary(error: BaseException) -> str:
    """An exception in one line: its class, the first line of its message, and where in the user's program it was."""
    lines = traceback.TracebackException.from_exception(error, limit=0).format_exception_only()
    line = next(iter(lines)).partition("\n")[0]
    line = line if len(line) <= LONGEST else f"{line[:LONGEST]}..."
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_hidden(frame.filename)]
    return f"{line} ({frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name})" if frames else line


def show_user_frames(told: BaseException | None = None) -> None:
    """Let an exception that ends the program be printed by :func:`format_error`, and one of another rank in one line.

    Where the program prints exceptions in a way of its own, it goes on doing so.

    Args:
        told: an exception that has been printed already, and is not printed again.
    """
    if sys.excepthook is sys.__excepthook__ or isinstance(sys.excepthook, _ExceptHook):
        sys.excepthook = _ExceptHook(told)


class _ExceptHook:
    def __init__(self, told: BaseException | None) -> None:
        self._told = None if told is None else _identity(told)  # the exception itself would hold its frames

    def __call__(self, kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        if isinstance(error, KeyboardInterrupt):
            sys.__excepthook__(kind, error, frames)
        elif isinstance(error, PeerFailedError) and error.summary and not _is_debugging():
            print(f"this rank is ended, since {error.summary}", file=sys.stderr)
        elif isinstance(error, WorkerLostError) and not _is_debugging():
            print(f"this rank is ended, since {summary(error).partition(': ')[2]}", file=sys.stderr)
        elif _identity(error) != self._told:
            print(format_error(error), end="", file=sys.stderr)


def _identity(error: BaseException) -> tuple[int, str]:
    return id(error), summary(error)
