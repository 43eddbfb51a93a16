"""StartWorker → a worker process; its end → Exited; Stop, or the launcher's end → the end of all of them.

One agent looks after the workers of one host in one launch. It is the kernel's "child subreaper": a process that a
worker has started, and whose parent has ended, becomes the agent's child. So whatever workers start stays among the
agent's descendants, and the agent does not end before they have.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import select
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from typing import NoReturn

import psutil
import setproctitle

from torchopt_dist.launch import worker
from torchopt_dist.launch.messages import (
    Alive,
    Exited,
    Halted,
    Started,
    StartWorker,
    Stop,
    receive,
    send,
    send_at_once,
)

__all__ = ["adopt_orphans", "end_tree", "reap", "serve", "wake_on_children"]

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
KILL_SECONDS = 3.0
"""For killed processes to end; one that the kernel holds, in a broken file system say, may not."""
ALIVE_SECONDS = 1.0
JANITOR_SECONDS = 0.5
JANITORS = ("multiprocessing.resource_tracker", "torch_shm_manager")
"""Programs that unlink shared memory when those who used it have ended, and then end themselves."""
ORPHANED_GRACE = 1.0
"""Seconds that workers have after SIGTERM when the launcher has ended and not waited for them, at most."""

libc = ctypes.CDLL(None, use_errno=True)


def serve(control: socket.socket, launcher_pid: int) -> None:
    """Look after workers until the launcher says stop, or ends.

    Args:
        control: the channel to the launcher.
        launcher_pid: the launcher. Its end is watched for beside that of ``control``, which processes that it has
            forked may hold open.
    """
    os.setsid()
    adopt_orphans()
    setproctitle.setproctitle(f"todist: agent of {launcher_pid}")
    try:
        launcher = os.pidfd_open(launcher_pid)
    except ProcessLookupError:
        return
    woken, wake = wake_on_children()
    ranks: dict[int, int] = {}
    own = (launcher, woken, wake)
    spoke = -math.inf
    while True:
        watched: list[socket.socket | int] = [control, launcher, woken]
        ready, _, _ = select.select(watched, [], [], ALIVE_SECONDS)
        if woken in ready:
            os.read(woken, 1 << 12)
        for message in _changes(ranks):
            with contextlib.suppress(OSError):  # the launcher's end is seen below
                send(control, message)
        if time.monotonic() - spoke > ALIVE_SECONDS:
            spoke = time.monotonic()
            with contextlib.suppress(OSError):  # nor does a launcher that has been stopped make an agent wait
                send_at_once(control, Alive(os.getpid()))
        if launcher not in ready and control not in ready:
            continue
        received = receive(control) if launcher not in ready else None
        if received is None:
            _end(list(ranks), ORPHANED_GRACE, ())
            return
        message, descriptors = received
        if isinstance(message, StartWorker):
            agent_pid = os.getpid()
            pid = os.fork()
            if pid == 0:
                _become_worker(message, descriptors, control, own, agent_pid)
            ranks[pid] = message.rank
            for descriptor in descriptors:
                os.close(descriptor)
            with contextlib.suppress(OSError):  # the launcher's end is seen above
                send(control, Started(message.rank, pid))
        elif isinstance(message, Stop):
            _end(list(ranks), message.grace, (control, launcher))
            return


def adopt_orphans() -> None:
    """Become the parent of those descendants whose own parent ends."""
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def wake_on_children() -> tuple[int, int]:
    """A pipe, both ends, whose first one has something to read when a child has ended."""
    woken, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    return woken, wake


def _become_worker(
    message: StartWorker,
    descriptors: list[int],
    control: socket.socket,
    own: tuple[int, ...],
    agent_pid: int,
) -> NoReturn:
    try:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # should the agent be killed
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setsid()
        control.close()
        for descriptor in own:
            os.close(descriptor)
        if os.getppid() == agent_pid:  # else the agent ended before it was watched
            worker.work(message, *descriptors)
    finally:
        os._exit(1)


def reap() -> list[tuple[int, int]]:
    """The processes that have ended, with exit codes or minus signals."""
    ended = []
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended.append((pid, os.waitstatus_to_exitcode(status)))
    return ended


def _changes(ranks: dict[int, int]) -> Iterator[Exited | Halted]:
    """What has become of workers; those that have ended leave ``ranks``."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            if pid == 0:
                return
            if pid not in ranks:
                continue
            if os.WIFSTOPPED(status):
                yield Halted(ranks[pid], os.WSTOPSIG(status))
            elif os.WIFCONTINUED(status):
                yield Halted(ranks[pid], None)
            else:
                yield Exited(ranks.pop(pid), os.waitstatus_to_exitcode(status))


def _end(workers: list[int], grace: float, launcher: Sequence[socket.socket | int]) -> None:
    """End the workers, gently first, and then everything that is left below this process.

    Args:
        workers: their processes.
        grace: seconds that they have after SIGTERM.
        launcher: what can be read when the launcher has ended; who does not wait for the workers gives them less time.
    """
    if grace > 0 and workers:
        for pid in workers:
            _signal(pid, signal.SIGTERM)
            _signal(pid, signal.SIGCONT)  # should it have been stopped
        _wait_until_ended(set(workers), grace, launcher)
    deadline = time.monotonic() + KILL_SECONDS
    janitors_until = time.monotonic() + JANITOR_SECONDS
    while time.monotonic() < deadline:
        try:
            if os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return  # no children, and so no descendants
        end_tree(psutil.Process(), and_janitors=time.monotonic() > janitors_until)
        time.sleep(0.002)


def end_tree(root: psutil.Process, and_janitors: bool) -> None:
    """Kill all descendants of a process."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in root.children(recursive=True):
            if and_janitors or not _is_janitor(process):
                _signal(process.pid, signal.SIGKILL)


def _wait_until_ended(pids: set[int], seconds: float, launcher: Sequence[socket.socket | int]) -> None:
    deadline = time.monotonic() + seconds
    while pids and time.monotonic() < deadline:
        pids.difference_update(pid for pid, _ in reap())
        if select.select(launcher, [], [], 0.002)[0]:
            launcher, deadline = (), min(deadline, time.monotonic() + ORPHANED_GRACE)


def _is_janitor(process: psutil.Process) -> bool:
    try:
        return any(name in part for part in process.cmdline() for name in JANITORS)
    except psutil.Error:
        return False


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
