"""The workers of a host in one world → those that are stopped, or late to start, and those that have ended."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping

import psutil

from torchopt_dist.launch.elastic.records import Place
from torchopt_dist.launch.elastic.worker import State, Work

__all__ = ["Watch"]


class Watch:
    """The processes of a world's workers, which begins now.

    Args:
        place: which host this is.
        work: what the workers do.
        pids: local rank → process.
    """

    def __init__(self, place: Place, work: Work, pids: Mapping[int, int]) -> None:
        self._place, self._work, self._pids = place, work, pids
        self._started = time.monotonic()
        self._halted: dict[int, float] = {}
        """Since when workers have been stopped, by local rank."""

    def ended(self) -> dict[int, int]:
        """Local rank → how its process has ended: with which exit code, or minus a signal."""
        statuses = {local_rank: _status(pid) for local_rank, pid in self._pids.items()}
        return {local_rank: status for local_rank, status in statuses.items() if status is not None}

    def late_to_start(self) -> list[int]:
        """The local ranks whose functions should have been called by now."""
        if time.monotonic() < self._started + self._place.start_timeout:
            return []
        return [rank for rank, state in enumerate(self._work.states) if state == State.STARTING]

    def end_halted(self) -> None:
        """End workers that a signal has stopped, and that do not go on."""
        seconds = self._place.halted_timeout
        if seconds is None:
            return
        now = time.monotonic()
        for local_rank, pid in self._pids.items():
            with contextlib.suppress(psutil.NoSuchProcess):
                if psutil.Process(pid).status() != psutil.STATUS_STOPPED:
                    self._halted.pop(local_rank, None)
                elif now > self._halted.setdefault(local_rank, now) + seconds:
                    os.kill(pid, signal.SIGKILL)

    def halted_for(self, local_rank: int) -> float:
        """For how many seconds a worker had been stopped, if it was ended for that."""
        since = self._halted.get(local_rank)
        return 0.0 if since is None else time.monotonic() - since


def _status(pid: int) -> int | None:
    """How a process has ended, if it has; torch is left to wait for it."""
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # torch has done so, and tells itself of all but 0
        return 0
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
