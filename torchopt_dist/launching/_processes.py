"""Requests to the kernel → what can be read or written, children that end, orphans as children, ends of trees."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import re
import select
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import psutil

__all__ = [
    "KILL_SECONDS",
    "LONGEST_WAIT",
    "adopt_orphans",
    "allow_many_files",
    "clear_signals",
    "end_descendants",
    "end_trees",
    "end_with_parent",
    "handles",
    "kill",
    "open_process",
    "ready",
    "reap",
    "signal_name",
    "umask",
    "wake_on_children",
]

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
JANITORS = ("resource_tracker import main", "torch_shm_manager")
"""Programs that unlink shared memory when those who used it have ended, and then end themselves. The first is Python's,
and joblib's; the second is torch's, which shares by files with ``set_sharing_strategy("file_system")``."""

JANITOR_SECONDS = 4.0
"""For these programs to end by themselves: torch's waits 2 s for another process that shares."""
KILL_SECONDS = JANITOR_SECONDS + 1.0
"""For killed processes to end; one that the kernel holds, in a broken file system say, may not."""
KILL_AGAIN_SECONDS, AT_MOST = 0.002, 0.032
"""Between two looks at what is left, at first and later."""

LONGEST_WAIT = 86400.0
"""Seconds that one call waits, at most: the kernel's calls accept no more than 24 days."""

HANDLED = re.compile(r"^Sig(?:Ign|Cgt):\s*([0-9a-f]+)$", re.MULTILINE)
UMASK = re.compile(r"^Umask:\s*([0-7]+)$", re.MULTILINE)

T = TypeVar("T")


def ready(watched: Iterable[tuple[int, bool, T]], seconds: float) -> list[T]:
    """What of a number of descriptors can be read, or written; waits until one can, or for so many seconds.

    Args:
        watched: the descriptors, each with whether it is to be written, too, and what stands for it in the result.
        seconds: how long to wait.
    """
    poll, of_number = select.poll(), {}  # not `select`, which knows the first 1024 descriptors only
    for number, to_write, each in watched:
        poll.register(number, select.POLLIN | (select.POLLOUT if to_write else 0))
        of_number[number] = each
    milliseconds = math.ceil(max(min(seconds, LONGEST_WAIT), 0.0) * 1000)
    return [of_number[number] for number, _ in poll.poll(milliseconds)]


def allow_many_files() -> None:
    """Let this process have as many open files as the system allows: a worker takes four to six of them."""
    import resource  # which only Unix has

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def clear_signals() -> None:
    """Let each signal reach this process, and do what it does by default.

    A new program inherits the signals that its parent has blocked or ignored. SIGHUP stays ignored under ``nohup``, and
    Python itself ignores SIGPIPE and SIGXFSZ.
    """
    for number in signal.valid_signals() - {signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ}:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def adopt_orphans() -> None:
    """Become the parent of those descendants whose own parent ends: the kernel's "child subreaper"."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this process when the thread that has forked it ends.

    Args:
        parent: the process that has forked this one; if it has ended already, so does this one.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def wake_on_children() -> tuple[int, int]:
    """Both ends of a pipe; the first can be read when a child has ended, was stopped or continues."""
    woken, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    return woken, wake


def open_process(pid: int) -> int | None:
    """A descriptor that can be read when the process has ended; ``None`` if it has."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def reap(options: int = 0) -> list[tuple[int, int]]:
    """The children that have ended, and their statuses.

    Args:
        options: ``os.WUNTRACED`` and ``os.WCONTINUED``, for children that were stopped and that continue, too.
    """
    changed = []
    with contextlib.suppress(ChildProcessError):
        while (child := os.waitpid(-1, os.WNOHANG | options))[0]:
            changed.append(child)
    return changed


def kill(pid: int, number: int | None = None) -> None:
    """Send a signal to a process, if it exists: SIGKILL, if none is given."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL if number is None else number)


def signal_name(number: int) -> str:
    """The name of a signal; ``signal 40`` if it is a real-time signal."""
    named = number in signal.valid_signals() and number < signal.SIGRTMIN
    return signal.Signals(number).name if named else f"signal {number}"


def handles(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal, or ignores it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text("utf-8", "replace")
    except OSError:  # it has ended
        return False
    return any(int(mask, 16) >> (number - 1) & 1 for mask in HANDLED.findall(status))


def umask() -> int | None:
    """This process's file mode mask (``umask``), which can only be read by setting it."""
    match = UMASK.search(Path("/proc/self/status").read_text("utf-8", "replace"))
    return int(match[1], 8) if match else None


def end_trees(roots: Iterable[psutil.Process], and_janitors: bool = False) -> None:
    """Kill processes and all their descendants.

    Args:
        roots: the processes.
        and_janitors: whether to kill those, too, that clean up and then end by themselves.
    """
    for root in roots:
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in (*root.children(recursive=True), root):
                if and_janitors or not is_janitor(process):
                    kill(process.pid)


def end_descendants(meanwhile: Callable[[], object]) -> None:
    """Kill all descendants of this process, and reap those that have ended, until none is left.

    Args:
        meanwhile: called between two looks at what is left.
    """
    begun, pause = time.monotonic(), KILL_AGAIN_SECONDS
    while (took := time.monotonic() - begun) <= KILL_SECONDS:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return  # no children, and so no descendants
        end_trees(psutil.Process().children(), and_janitors=took > JANITOR_SECONDS)
        meanwhile()
        time.sleep(pause)
        pause = min(2 * pause, AT_MOST)


def is_janitor(process: psutil.Process) -> bool:
    """Whether a process is one of :data:`JANITORS`."""
    try:
        return any(name in part for part in process.cmdline() for name in JANITORS)
    except psutil.Error:
        return False
