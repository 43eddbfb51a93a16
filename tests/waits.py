"""A condition, a file → a wait that ends when it holds, or in a failure of the test after a generous time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

SECONDS = 30.0


def wait_until(
    condition: Callable[[], object], seconds: float = SECONDS, tell: Callable[[], str] | None = None
) -> None:
    """Wait until a condition holds, and fail with what ``tell`` returns if it does not in that time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, tell() if tell else "it has not come about"
        time.sleep(0.002)


def watch(path: Path, seconds: float = 20.0) -> bool:
    """Wait until a file is there: whether it came within the time."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def say(path: Path, text: str = "") -> None:
    """Make a file in one step, so that who watches for it finds it whole."""
    draft = path.with_suffix(f".draft{os.getpid()}")
    draft.write_text(text)
    draft.rename(path)


def soon(seconds: float) -> float:
    """The seconds, or more where others want the cores as well."""
    return seconds * max(1.0, 2 * os.getloadavg()[0] / (os.cpu_count() or 1))
