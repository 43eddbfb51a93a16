"""``with no_new_descriptors(): ...`` → of the descriptors that are open after it, each was open before."""

from __future__ import annotations

import contextlib
import gc
import os
import time


@contextlib.contextmanager
def no_new_descriptors(seconds=10.0):
    """What is closed late, by a thread or the collector, has some time for it.

    Which ones are compared, not how many: those of an earlier test may be closed meanwhile.
    """
    gc.collect()
    before = _descriptors()
    yield
    deadline = time.monotonic() + seconds
    while new := _descriptors() - before:
        assert time.monotonic() < deadline, f"still open: {sorted(new)}"
        gc.collect()
        time.sleep(0.01)


def _descriptors():
    """The number of each and what it is; without the one that they are listed by."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.add((int(number), os.readlink(f"/proc/self/fd/{number}")))
    return found
