"""``breakpoint()`` in a worker → the debugger, at the terminal in which the program was started; one rank at a time.

A worker has no terminal of its own. The launcher's is open to it if the worker is on the same machine: since it is not
the worker's controlling terminal, the worker may read from it although it is in no foreground group.
"""

from __future__ import annotations

import contextlib
import os
import sys
from types import FrameType
from typing import IO, Any

__all__ = ["install", "terminal"]

NO_TERMINAL = (
    "`breakpoint()` in a worker needs the terminal in which the program was started, and {why}: "
    "call the function in your own process (`Debug a worker` in the documentation), or set PYTHONBREAKPOINT "
    "to a debugger that opens a port"
)


def terminal() -> str | None:
    """The name of the terminal that this process reads from; ``None`` if it reads from something else."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        return os.ttyname(sys.stdin.fileno())
    return None


def install(name: str | None, rank: int) -> None:
    """Let ``breakpoint()`` debug at a terminal.

    Args:
        name: the terminal's name; ``None`` if there is none on this machine.
        rank: the worker's rank, for the prompt.
    """

    def stop(*args: Any, **kwargs: Any) -> Any:
        if os.environ.get("PYTHONBREAKPOINT"):
            return sys.__breakpointhook__(*args, **kwargs)
        _debugger(name, rank).set_trace(sys._getframe(1))
        return None

    sys.breakpointhook = stop


def _debugger(name: str | None, rank: int) -> Any:
    import fcntl  # which only Unix has
    from pdb import Pdb  # with its imports it takes longer than the start of a worker should

    class Debugger(Pdb):
        """The debugger; while it waits for commands, no other rank does."""

        def interaction(self, frame: FrameType | None, *args: Any) -> None:
            fcntl.flock(self.stdin, fcntl.LOCK_EX)
            try:
                super().interaction(frame, *args)
            finally:
                fcntl.flock(self.stdin, fcntl.LOCK_UN)

    if name is None:
        raise RuntimeError(NO_TERMINAL.format(why="there is none on this machine"))
    try:
        reader, writer = _open(name, "r"), _open(name, "w")
    except OSError as error:
        raise RuntimeError(NO_TERMINAL.format(why=f"{name} cannot be opened ({error.strerror})")) from error
    debugger = Debugger(stdin=reader, stdout=writer, nosigint=True)
    debugger.prompt = f"(Pdb, rank {rank}) "
    return debugger


def _open(name: str, mode: str) -> IO[str]:
    """A terminal as a file; it does not become that of this session."""
    flags = os.O_NOCTTY | (os.O_RDONLY if mode == "r" else os.O_WRONLY)
    return os.fdopen(os.open(name, flags), mode, encoding="utf-8", errors="replace", buffering=1)
