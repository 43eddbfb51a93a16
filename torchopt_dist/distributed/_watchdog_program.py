"""Standard input: whom to watch, and where rank 0 is → when a worker is stopped for long, a line there, and SIGKILL.

A program of its own, run by a worker that has its machine for itself, with nothing but the standard library. It ends
with the worker. While it is not heard of, the worker's machine, or its container, is frozen as a whole.
"""

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time

LAST_WORD_SECONDS = 0.1
"""For rank 0 to hear why the worker ends before it sees that."""


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal; one that a debugger holds is not."""
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()[0] == "T"


def watch(pid: int, interval: float, looks: int, hub: socket.socket | None) -> None:
    """Look at the process until it has ended, or has been stopped for more than so many looks."""
    stopped = 0
    while stopped <= looks:
        if hub is not None:
            hub.sendall(b"\n")
        if select.select([sys.stdin], [], [], interval)[0] or os.getppid() != pid:
            return
        stopped = stopped + 1 if is_stopped(pid) else 0
    with contextlib.suppress(OSError):
        if hub is not None:
            hub.sendall(b"stopped\n")
            time.sleep(LAST_WORD_SECONDS)
    os.kill(pid, signal.SIGKILL)


def main() -> None:
    """See the module."""
    task = json.loads(sys.stdin.readline())
    hub = None
    with contextlib.suppress(OSError):
        if task["hub"] is not None:
            hub = socket.create_connection(task["hub"])
            hub.sendall(task["hello"].encode())
        watch(task["pid"], task["interval"], task["looks"], hub)


if __name__ == "__main__":
    main()
