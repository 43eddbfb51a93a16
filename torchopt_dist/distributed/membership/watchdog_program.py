"""Standard input: the process to watch, rank 0's address → a line to rank 0 and SIGKILL if it is stopped for long.

A separate program, run by a worker that is alone on its machine, which uses the standard library only. It ends with the
worker. If it is silent, the worker's machine or container is frozen as a whole.
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
    """Check the process until it has ended, or has been stopped for more than so many checks."""
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
    """Run the program; see the module."""
    task = json.loads(sys.stdin.readline())
    hub = None
    with contextlib.suppress(OSError):
        if task["hub"] is not None:
            hub = socket.create_connection(task["hub"])
            hub.sendall(task["hello"].encode())
        watch(task["pid"], task["interval"], task["looks"], hub)


if __name__ == "__main__":
    main()
