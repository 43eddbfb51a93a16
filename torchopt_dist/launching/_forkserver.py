"""A connection to a socket → an agent at its other end, forked from a process that has imported torch already.

Importing torch takes seconds, forking takes milliseconds. The forkserver is started by the first launch of a program,
on this machine or by SSH on another, and lives as long as the program. It has one thread, and it never touches a GPU:
CUDA does not survive a fork. An agent or a worker that itself launches workers connects to the same forkserver.

What only some workers need is imported by a fork of the forkserver, its successor, so no launch waits for that. When
this is done, the successor forks the agents.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import math
import os
import platform
import re
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import cloudpickle
import psutil
import setproctitle
import torch

from torchopt_dist.launching import _processes as processes
from torchopt_dist.launching._agent import Agent
from torchopt_dist.launching._settings import import_path
from torchopt_dist.torch_private import interpreter_flags

__all__ = ["MARK", "PROGRAM", "connect", "read_on_import", "serve", "serve_by_ssh", "versions"]

PRELOAD_WHEN_IDLE = "torch._dynamo"
"""It takes as long as torch itself, and torch imports it when the first optimizer is made. The first workers start
without it."""
IDLE_SECONDS = 0.3
READ_ON_IMPORT = re.compile(
    "(OMP|GOMP|KMP|MKL|OPENBLAS|NUMEXPR|LD|TORCH|TORCHDYNAMO|TORCHINDUCTOR|PYTORCH|ATEN)_"
)
SET_LATER = re.compile("OMP_NUM_THREADS|TORCH_NCCL_|TORCHINDUCTOR_CACHE_DIR")
"""Of these, workers take the value that they are given, whenever they are forked. Compiling sets the last one."""
CREDENTIALS = struct.Struct("iII")
"""Process, user and group of who has connected."""
BACKLOG = 1024
MARK = b"\0todist\0"
"""Stands before a greeting; what a shell's start-up files print comes before."""
PROGRAM = (
    "import json,os,sys;"
    "start=json.loads(open(0,'rb',0,closefd=False).readline());"
    "start['own']=dict(os.environ);"
    "os.environ.update(start['env']);"
    "sys.path+=[p for p in start['path'] if p not in sys.path];"
    "from torchopt_dist.launching._forkserver import serve_by_ssh;"
    "serve_by_ssh(start)"
)
"""What Python is given to run on another machine. Variables and paths come by standard input: a command line is for all
to see."""


# The side of those who launch.


@dataclass
class _Server:
    """A forkserver of this program."""

    address: str
    """Of its socket, which is abstract: it is not in the file system."""
    loaded: dict[str, str]
    """The environment variables with which it imported libraries that read them."""
    process: subprocess.Popen[bytes] | None = None
    """Itself, if this process has started it."""

    @property
    def has_ended(self) -> bool:
        """Whether it has; its successor, which the kernel is about to kill, may listen a moment longer."""
        return self.process is not None and self.process.poll() is not None

    def stop(self) -> None:
        """Kill it. The agents that it has forked go on."""
        if self.process is not None:
            self.process.kill()  # since one that has been stopped does not see SIGTERM
            self.process.wait()


_server: _Server | None = None
_lock = threading.Lock()


def connect(env: Mapping[str, str]) -> socket.socket:
    """A connection to a new agent on this machine.

    Args:
        env: the environment of its workers. If variables in it that libraries read when they are imported have changed,
            the forkserver is replaced by a new one.

    Raises:
        OSError: the system lets no process be started, or no file be opened.
    """
    global _server
    with _lock:
        while True:
            if _server is not None and (_server.has_ended or _server.loaded != read_on_import(env)):
                _server.stop()
                _server = None
            fresh = _server is None
            _server = _server or _start(env)
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(_server.address)
                return connection
            except OSError:  # it has ended
                connection.close()
                _server.stop()
                _server = None
                if fresh:
                    raise


def read_on_import(env: Mapping[str, str]) -> dict[str, str]:
    """The variables that libraries read when they are imported."""
    return {n: value for n, value in env.items() if READ_ON_IMPORT.match(n) and not SET_LATER.match(n)}


def _start(env: Mapping[str, str]) -> _Server:
    import fcntl  # which only Unix has

    with (
        socket.socket(socket.AF_UNIX) as made,
        # A number above those of the standard streams, which may be closed here and are others there.
        socket.socket(fileno=fcntl.fcntl(made, fcntl.F_DUPFD_CLOEXEC, 3)) as listener,
    ):
        address = f"\0todist-{secrets.token_hex(16)}"
        listener.bind(address)
        listener.listen(BACKLOG)
        program = (
            f"import sys; sys.path[:] = {import_path()!r}\n"
            "from torchopt_dist.launching._forkserver import serve\n"
            f"serve({listener.fileno()}, {os.getpid()})"
        )
        process = subprocess.Popen(
            [sys.executable, *interpreter_flags(), "-c", program],
            env=dict(env),
            pass_fds=[listener.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in the terminal is the launcher's to handle
        )
        server = _Server(address, read_on_import(env), process)
    atexit.register(_stop_at_exit, server, os.getpid())
    return server


def _stop_at_exit(server: _Server, pid: int) -> None:
    if os.getpid() == pid:  # and not a process forked from it
        server.stop()


# The side of the forkserver.


def serve(listener: int, launcher: int) -> None:
    """The whole life of a forkserver on the machine of the launcher, a process with which it ends.

    Launches connect to the socket with the descriptor ``listener``.
    """
    launcher_end = processes.open_process(launcher)
    if launcher_end is not None:
        with socket.socket(fileno=listener) as connections:
            connections.set_inheritable(False)
            _serve(connections, launcher_end, f"{launcher}", patience=None, by_ssh=False)


def serve_by_ssh(start: dict[str, Any]) -> None:
    """The whole life of a forkserver on another machine, whose standard input and output lead to the launcher.

    Args:
        start: what the launcher has sent: ``launcher``, its name; ``folder``, the working folder of workers;
            ``patience``, the seconds without a byte from the launcher after which it counts as lost; ``base``, those of
            the variables ``env`` that all programs here should have; and what :data:`PROGRAM` has used or added.
    """
    launcher_end, out = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)  # whatever is printed here is no greeting
    processes.allow_many_files()
    folder = tempfile.mkdtemp(prefix="todist-")  # for this user alone
    try:
        with socket.socket(socket.AF_UNIX) as connections:
            connections.bind(f"{folder}/socket")
            connections.listen(BACKLOG)
            ssh = os.environ.get("SSH_CONNECTION", "").split()
            greeting = {
                "versions": versions(),
                "socket": f"{folder}/socket",
                "cores": len(os.sched_getaffinity(0)),
                "gpus": _count_gpus(),
                "env": {**start["own"], **start["base"]},
                "path": sys.path,
                "has_folder": os.path.isdir(start["folder"]),
                "launcher_address": ssh[0] if len(ssh) == 4 else "",
                "address": ssh[2] if len(ssh) == 4 else "",
            }
            with open(out, "wb") as file:
                file.write(MARK + json.dumps(greeting).encode() + b"\n")
            os.set_blocking(launcher_end, False)
            _serve(connections, launcher_end, start["launcher"], start["patience"], by_ssh=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def versions() -> dict[str, str]:
    """The versions that must be the same on all hosts, since hosts send each other pickles."""
    package = sys.modules[__name__.partition(".")[0]]  # it is above this room, and there
    return {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "torch": torch.__version__.partition("+")[0],
        "torchopt_dist": str(package.__version__),
        "cloudpickle": cloudpickle.__version__,
    }


def _count_gpus() -> int:
    """The number of GPUs, found by another process, since a process that has used CUDA may not fork."""
    pid = os.fork()
    if pid == 0:
        number = 0
        try:
            number = min(torch.cuda.device_count(), 255)
        finally:
            os._exit(number)
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), 0)


def _serve(
    connections: socket.socket, launcher_end: int, launcher: str, patience: float | None, by_ssh: bool
) -> None:
    """Fork agents until the launcher has ended.

    Args:
        connections: the socket to which launches connect.
        launcher_end: a descriptor that can be read when the launcher has ended or, if ``patience`` is given, when it
            has given a sign of life.
        launcher: its name, for messages.
        patience: seconds without a sign of life after which the launcher counts as lost.
        by_ssh: whether the launcher is on another machine: agents then end with this process.
    """
    setproctitle.setproctitle(f"todist: forkserver of {launcher}")
    processes.clear_signals()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    processes.adopt_orphans()  # of an agent that is killed
    woken, wake = processes.wake_on_children()
    agents: set[int] = set()
    successor = None if PRELOAD_WHEN_IDLE in sys.modules else 0
    gc.collect()
    gc.freeze()  # the collector of a forked process need not walk over, and so copy, all of torch
    serves = True  # until the successor does
    lost_at = math.inf if patience is None else time.monotonic() + patience
    idle_at, takes_over = math.inf, -1
    while True:
        watched = [fd for fd in (launcher_end, woken, takes_over) if fd >= 0]
        own = [*watched, wake]
        if serves:
            watched.append(connections.fileno())
        seconds = min(lost_at, idle_at) - time.monotonic()
        ready = processes.ready([(fd, False, fd) for fd in watched], seconds)
        if launcher_end in ready:
            if patience is None or not os.read(launcher_end, 1 << 12):
                return
            lost_at = time.monotonic() + patience
        elif time.monotonic() >= lost_at:
            return
        if woken in ready:
            os.read(woken, 1 << 12)
            ended = _bury(agents)
            serves = serves or successor in ended
        if takes_over in ready:
            serves = not os.read(takes_over, 1)
            os.close(takes_over)
            takes_over = -1
        elif connections.fileno() in ready:
            connection, peer = _accept(connections)
            if connection is not None:
                watched = [peer, os.getpid()] if by_ssh else [peer]
                pid = os.fork()
                if pid == 0:
                    _end_after(partial(_become_agent, connection, watched, connections, own))
                agents.add(pid)
                connection.close()
            if successor == 0:
                idle_at = time.monotonic() + IDLE_SECONDS
        elif time.monotonic() > idle_at:
            idle_at = math.inf
            with contextlib.suppress(OSError):  # there are too many files or processes
                successor, takes_over = _start_successor(connections, own, launcher, by_ssh)
                agents.add(successor)


def _start_successor(
    connections: socket.socket, not_for_it: list[int], launcher: str, by_ssh: bool
) -> tuple[int, int]:
    """Fork a process that imports what is imported when idle, and is a forkserver as well from then on.

    It comes with a descriptor from which a byte can be read when it has taken over.
    """
    server, (takes_over, says_so) = os.getpid(), os.pipe2(os.O_CLOEXEC)
    try:
        pid = os.fork()
    except OSError:
        os.close(takes_over)
        os.close(says_so)
        raise
    if pid == 0:
        not_for_it = [*not_for_it, takes_over]
        _end_after(partial(_succeed, server, connections, not_for_it, launcher, by_ssh, says_so))
    os.close(says_so)
    return pid, takes_over


def _succeed(
    server: int, connections: socket.socket, not_for_it: list[int], launcher: str, by_ssh: bool, says_so: int
) -> None:
    """In a process that has just been forked: the whole life of a successor, which ends with the forkserver."""
    processes.end_with_parent(server)
    signal.set_wakeup_fd(-1)
    for descriptor in not_for_it:
        os.close(descriptor)
    importlib.import_module(PRELOAD_WHEN_IDLE)
    server_end = processes.open_process(server)
    if server_end is not None:
        os.write(says_so, b"\0")
        os.close(says_so)
        _serve(connections, server_end, launcher, None, by_ssh)


def _end_after(work: Callable[[], object]) -> NoReturn:
    """In a process that has just been forked: do some work, and end."""
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        with contextlib.suppress(Exception):
            traceback.print_exc()
    finally:
        os._exit(code)


def _accept(connections: socket.socket) -> tuple[socket.socket | None, int]:
    """The next connection and the process at its other end, if that is this user's."""
    connection, _ = connections.accept()
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    pid, user, _ = CREDENTIALS.unpack(credentials)
    if user == os.getuid() and pid:
        return connection, pid
    connection.close()
    return None, 0


def _bury(agents: set[int]) -> Collection[int]:
    """Remove agents that have ended, and kill the processes that were left by an agent that was killed itself.

    Those that clean up after the others end by themselves, and are removed later. Returns what has ended.
    """
    ended = dict(processes.reap())
    left_something = any(pid not in agents or status != 0 for pid, status in ended.items())
    agents -= ended.keys()
    if left_something:
        processes.end_trees(child for child in psutil.Process().children() if child.pid not in agents)
    return ended


def _become_agent(
    connection: socket.socket, watched: list[int], connections: socket.socket, not_for_it: list[int]
) -> None:
    """In a process that has just been forked: the whole life of an agent."""
    global _server
    signal.set_wakeup_fd(-1)
    # Launches from here on ask the same forkserver.
    _server = _Server(connections.getsockname(), read_on_import(os.environ))
    connections.close()
    for descriptor in not_for_it:
        os.close(descriptor)
    Agent(connection, watched).run()
