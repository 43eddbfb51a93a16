"""The workers of this machine → those whose processes have ended, or have been stopped for too long, as by SIGSTOP.

The kernel answers for a stopped process, so its connections stay open. Its state in the process table shows that it is
stopped; a process that computes never has that state, even if its Python threads do not run. The connections of a
process that has ended stay open, too, if a library has forked another one that Python knows nothing of.

No other worker sees in the process table a worker that is alone on its machine: a second process notices when it is
stopped, and reports to rank 0. A thread of the worker would stop with it, and would wait while a C call holds Python's
interpreter lock; another process does neither.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil

from torchopt_dist.distributed.membership.link import DIED, STOPPED
from torchopt_dist.process.liveness import Liveness

__all__ = ["StoppedProcesses", "Watchdog", "is_heard", "is_running", "looks", "process_table"]


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


def _status(process: psutil.Process | None) -> str | None:
    """The state of a process; ``None`` if it has ended, empty if this one cannot see it, as for lack of descriptors."""
    if process is None:
        return None
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
        self._processes: dict[int, psutil.Process | None] = {}
        """Of each rank; ``None``, if it had ended before it was watched."""
        for rank, pid in pids.items():
            self.watch(rank, pid)

    def watch(self, rank: int, pid: int) -> None:
        """Check this process of a rank from now on, instead of the one before."""
        self._counts.pop(rank, None)
        self._processes.pop(rank, None)
        with contextlib.suppress(psutil.Error, OSError):  # it cannot be seen
            try:
                self._processes[rank] = psutil.Process(pid)
            except psutil.NoSuchProcess:
                self._processes[rank] = None

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
        process = self._processes.get(rank)
        if process is not None:
            with contextlib.suppress(psutil.Error):
                process.kill()


PROGRAM = Path(__file__).with_name("watchdog_program.py")
LAST_ACKNOWLEDGED = struct.Struct("@56xI")
"""Linux's ``tcp_info``: milliseconds since the other machine has last acknowledged anything."""


class Watchdog:
    """Watches this process, from another one, until it is closed; ``can_be``: whether that works on this system.

    ``hub`` is host and port of rank 0's hub, and the text with which a connection begins; ``None`` if this is rank 0.
    """

    can_be = bool(sys.executable) and Path("/proc/self/stat").exists()

    def __init__(self, liveness: Liveness, hub: tuple[str, int, str] | None) -> None:
        task = {
            "pid": os.getpid(),
            "interval": liveness.interval,
            "looks": looks(liveness),
            "hub": None if hub is None else hub[:2],
            "hello": "" if hub is None else hub[2],
        }
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(task), file=self._process.stdin, flush=True)

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()


async def is_heard(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, liveness: Liveness) -> bool:
    """Receive a watchdog's signs of life until it ends; ``False`` if its worker was stopped for the patience."""
    silent = 0
    while silent <= looks(liveness) or not _kernel_answers(writer, liveness):
        try:
            line = await asyncio.wait_for(reader.readline(), liveness.interval)
        except TimeoutError:  # counting these, rank 0 judges nobody for a time in which it was stopped itself
            silent += 1
            continue
        if line != b"\n":
            return line != b"stopped\n"
        silent = 0
    return False


def _kernel_answers(writer: asyncio.StreamWriter, liveness: Liveness) -> bool:
    """Whether the network is whole, and so only the process is silent."""
    if not hasattr(socket, "TCP_INFO"):
        return False
    info = writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    milliseconds: int = LAST_ACKNOWLEDGED.unpack_from(info)[0]
    return milliseconds < 500 * liveness.patience
