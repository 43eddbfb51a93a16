"""Workers of pytest-xdist → tests that run beside each other, and tests that run alone."""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Turns:
    """One worker's part of the locks that all workers of a run have.

    A test that is to run alone locks the room for itself; others share the room. A test that waits for the room keeps
    the door locked, so that no other can enter in the meantime.
    """

    def __init__(self, run: str) -> None:
        folder = Path(tempfile.gettempdir())
        self._door, self._room = ((folder / f"todist-{run}-{name}").open("w") for name in ("door", "room"))

    @contextmanager
    def turn(self, alone: bool) -> Iterator[None]:
        """Wait for the room, and leave it at the end."""
        fcntl.flock(self._door, fcntl.LOCK_EX)
        try:
            fcntl.flock(self._room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        finally:
            fcntl.flock(self._door, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(self._room, fcntl.LOCK_UN)

    def close(self) -> None:
        for file in (self._door, self._room):
            file.close()
            Path(file.name).unlink(missing_ok=True)
