"""The workers of this machine → those whose processes have ended, or have been stopped for too long, as by SIGSTOP.

The kernel answers for a stopped process, so its connections stay open. Its state in the process table shows that it is
stopped; a process that computes never has that state, even if its Python threads do not run. The connections of a
process that has ended stay open, too, if a library has forked another one that Python knows nothing of.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from pathlib import Path

import psutil

from torchopt_dist.distributed.membership.link import DIED, STOPPED
from torchopt_dist.process.liveness import Liveness

__all__ = ["StoppedProcesses", "is_running", "looks", "process_table"]


def process_table() -> str:
    """The system and its namespace of process ids: equal for two processes that see each other by their ids."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):  # Linux
        parts += [
            Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            os.readlink("/proc/self/ns/pid"),
        ]
    return " ".join(parts)


def looks(liveness: Liveness) -> int:
    """How many times in a row a process may be found stopped."""
    return max(1, round(liveness.patience / liveness.interval))


def is_running(pid: int) -> bool:
    """Whether there is a process with that id that has not ended, as far as this one can see."""
    try:
        return _status(psutil.Process(pid)) is not None
    except psutil.NoSuchProcess:
        return False
    except (psutil.Error, OSError):
        return True


def _status(process: psutil.Process) -> str | None:
    """The state of a process; ``None`` if it has ended, empty if this one cannot see it, as for lack of descriptors."""
    try:
        status: str = process.status()
    except psutil.NoSuchProcess:
        return None
    except (psutil.Error, OSError):
        return ""
    return None if status == psutil.STATUS_ZOMBIE else status


class StoppedProcesses:
    """Checks processes at each call, and counts how often in a row each was found stopped.

    It counts checks instead of seconds, so a time in which this process was stopped itself does not count.
    """

    def __init__(self, pids: Mapping[int, int], liveness: Liveness) -> None:
        self._looks = looks(liveness)
        self._counts: dict[int, int] = {}
        self._processes: dict[int, psutil.Process] = {}
        for rank, pid in pids.items():
            self.watch(rank, pid)

    def watch(self, rank: int, pid: int) -> None:
        """Check this process of a rank from now on, instead of the one before."""
        self._counts.pop(rank, None)
        self._processes.pop(rank, None)
        with contextlib.suppress(psutil.Error, OSError):  # it is gone already, or cannot be seen
            self._processes[rank] = psutil.Process(pid)

    def look(self) -> list[tuple[int, str]]:
        """The ranks whose processes have ended, or have been stopped for longer than the patience, and which it is.

        That a process has ended is told at the second look: it may have said before that it leaves.
        """
        found = []
        for rank, process in tuple(self._processes.items()):
            status = _status(process)
            limit, cause = (1, DIED) if status is None else (self._looks, STOPPED)
            self._counts[rank] = (
                self._counts.get(rank, 0) + 1 if status in (None, psutil.STATUS_STOPPED) else 0
            )
            if self._counts[rank] > limit:
                found.append((rank, cause))
                if status is None:
                    del self._processes[rank]
        return found

    def kill(self, rank: int) -> None:
        """Kill the process of a rank, if it is one of these."""
        if rank in self._processes:
            with contextlib.suppress(psutil.Error):
                self._processes[rank].kill()
