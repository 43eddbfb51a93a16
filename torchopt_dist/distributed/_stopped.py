"""The workers of this machine → those whose processes have been stopped for too long, as by SIGSTOP.

The kernel answers for a stopped process, so its connections stay open. Its state in the process table shows that it is
stopped; a process that computes never has that state, even if its Python threads do not run.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from pathlib import Path

import psutil

from torchopt_dist._liveness import Liveness

__all__ = ["StoppedProcesses", "is_running", "process_table"]


def process_table() -> str:
    """The system and its namespace of process ids: equal for two processes that see each other by their ids."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):  # Linux
        parts += [
            Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            os.readlink("/proc/self/ns/pid"),
        ]
    return " ".join(parts)


def is_running(pid: int) -> bool:
    """Whether there is a process with that id that has not ended."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


class StoppedProcesses:
    """Checks processes at each call, and counts how often in a row each was found stopped.

    It counts checks instead of seconds, so a time in which this process was stopped itself does not count.

    Args:
        pids: ids of the processes, by rank.
        liveness: how often it is called, and how long a process may be stopped.
    """

    def __init__(self, pids: Mapping[int, int], liveness: Liveness) -> None:
        self._looks = max(1, round(liveness.patience / liveness.interval))
        self._counts: dict[int, int] = {}
        self._processes: dict[int, psutil.Process] = {}
        for rank, pid in pids.items():
            self.watch(rank, pid)

    def watch(self, rank: int, pid: int) -> None:
        """Check this process of a rank from now on, instead of the one before."""
        self._counts.pop(rank, None)
        self._processes.pop(rank, None)
        with contextlib.suppress(psutil.Error):  # it is gone already
            self._processes[rank] = psutil.Process(pid)

    def look(self) -> list[int]:
        """The ranks whose processes have been stopped for longer than the patience."""
        for rank, process in self._processes.items():
            try:
                stopped = process.status() == psutil.STATUS_STOPPED
            except psutil.Error:
                stopped = False
            self._counts[rank] = self._counts.get(rank, 0) + 1 if stopped else 0
        return [rank for rank, count in self._counts.items() if count > self._looks]

    def kill(self, rank: int) -> None:
        """Kill the process of a rank, if it is one of these."""
        if rank in self._processes:
            with contextlib.suppress(psutil.Error):
                self._processes[rank].kill()
