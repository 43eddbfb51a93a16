"""A worker that is alone on its machine → a second process that notices when it is stopped, and reports to rank 0.

The kernel answers for a stopped process, and no other worker sees it in the process table. A thread of the worker would
stop with it, and would wait while a C call holds Python's interpreter lock; another process does neither.
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
from pathlib import Path

from torchopt_dist.distributed.membership.stopped import looks
from torchopt_dist.process.liveness import Liveness

__all__ = ["Watchdog", "is_heard"]

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
