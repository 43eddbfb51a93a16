"""Request → an agent, forked from a process that has imported torch already.

Importing torch takes seconds, forking takes milliseconds. The server is started by the first launch of a program and
lives as long as the program. It has one thread, and it never touches a GPU: CUDA does not survive a fork. An agent or a
worker that launches in its turn asks the same server.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import util
from pathlib import Path
from typing import NoReturn

import psutil

from torchopt_dist.launch import agent
from torchopt_dist.launch.environment import import_path
from torchopt_dist.launch.messages import ForkAgent, pair, receive, send

__all__ = ["PRELOAD", "fork_server", "request_agent", "serve"]

PRELOAD = ("numpy.random", "torch", "torch.distributed.rpc", "setproctitle", "psutil", "torchopt_dist")
PRELOAD_WHEN_IDLE = "torch._dynamo"
"""It takes as long as torch itself, and torch imports it when the first optimizer is made. Without it the first workers
start sooner."""
IDLE_SECONDS = 0.3
READ_ON_IMPORT = (
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
    "NUMEXPR_",
    "LD_",
    "TORCH_",
    "TORCHDYNAMO_",
    "TORCHINDUCTOR_",
    "PYTORCH_",
    "ATEN_",
)
SET_LATER = ("OMP_NUM_THREADS", "TORCH_NCCL_", "TORCHINDUCTOR_CACHE_DIR")
"""Of these, workers take the value that they are given, whenever they are forked. Compiling sets the last one."""
UMASK = re.compile(r"^Umask:\s*([0-7]+)$", re.MULTILINE)


@dataclass
class _Server:
    """The launcher's side of a server.

    Attributes:
        requests: the channel to it.
        loaded: the variables that libraries read when it imported them.
        process: the process, if this one has started it.
    """

    requests: socket.socket
    loaded: dict[str, str]
    process: subprocess.Popen[bytes] | None = None

    def stop(self) -> None:
        """End the server, which has nothing to put in order. The agents that it has forked go on."""
        self.requests.close()
        if self.process is not None:
            self.process.kill()  # since one that has been stopped does not see SIGTERM
            self.process.wait()


_server: _Server | None = None
_lock = threading.Lock()


def request_agent(env: Mapping[str, str]) -> socket.socket:
    """Have an agent forked.

    Args:
        env: the environment of its workers. If variables among it that libraries read while they are imported have
            changed, the server is replaced by a new one.

    Returns:
        The launcher's end of the agent's control channel.
    """
    global _server
    with _lock:
        while True:
            if _server is not None and _server.loaded != _read_on_import(env):
                _server.stop()
                _server = None
            fresh = _server is None
            server = _server = _server or _start(env)
            ours, theirs = pair()
            try:
                with theirs:
                    ends = (theirs.fileno(), server.requests.fileno())
                    request = ForkAgent(os.getpid(), os.sched_getaffinity(0), _umask())
                    send(server.requests, request, *ends)
                return ours
            except OSError:  # the server has ended
                ours.close()
                server.stop()
                _server = None
                if fresh:
                    raise


def fork_server(not_for_it: tuple[int, ...]) -> None:
    """Make a server of a fork of this process, which has imported what a server imports and has one thread.

    Args:
        not_for_it: descriptors that it must not hold.
    """
    global _server
    ours, theirs = pair()
    launcher_pid = os.getpid()
    if os.fork() == 0:
        try:
            os.setsid()
            ours.close()
            for descriptor in not_for_it:
                os.close(descriptor)
            serve(theirs.detach(), launcher_pid)
        finally:
            os._exit(0)
    theirs.close()
    _server = _Server(ours, _read_on_import(os.environ))


def inherit(requests: socket.socket) -> None:
    """In an agent: launches from here on ask the server that has forked it."""
    global _server, _lock
    _lock = threading.Lock()
    _server = _Server(requests, _read_on_import(os.environ))


def _read_on_import(env: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in env.items()
        if name.startswith(READ_ON_IMPORT) and not name.startswith(SET_LATER)
    }


def _umask() -> int | None:
    """This process's, which cannot be asked for without setting it."""
    found = UMASK.search(Path("/proc/self/status").read_text("utf-8", "replace"))
    return int(found[1], 8) if found else None


def _start(env: Mapping[str, str]) -> _Server:
    ours, theirs = pair()
    with theirs:
        program = (
            f"import sys; sys.path[:] = {import_path()!r}\n"
            f"from torchopt_dist.launch.forkserver import serve; serve({theirs.fileno()}, {os.getpid()})"
        )
        process = subprocess.Popen(
            [sys.executable, *util._args_from_interpreter_flags(), "-c", program],  # type: ignore[attr-defined]
            env=dict(env),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in the terminal is the launcher's to handle
        )
    server = _Server(ours, _read_on_import(env), process)
    atexit.register(_stop_at_exit, server, os.getpid())
    return server


def _stop_at_exit(server: _Server, pid: int) -> None:
    if os.getpid() == pid:  # and not a process forked from it
        server.stop()


def serve(descriptor: int, launcher_pid: int) -> None:
    """Fork agents until the launcher has ended: the server's whole life."""
    os.set_inheritable(descriptor, False)
    for name in PRELOAD:
        importlib.import_module(name)
    importlib.import_module("setproctitle").setproctitle(f"todist: forkserver of {launcher_pid}")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    agent.adopt_orphans()  # of an agent that is killed
    woken, wake = agent.wake_on_children()
    agents: set[int] = set()
    gc.collect()
    gc.freeze()  # the collector of a forked process need not walk over, and so copy, all of torch
    try:
        launcher = os.pidfd_open(launcher_pid)
    except ProcessLookupError:
        return
    with socket.socket(fileno=descriptor) as requests:
        watched: list[socket.socket | int] = [requests, launcher, woken]
        idle_seconds = None
        while True:
            ready, _, _ = select.select(watched, [], [], idle_seconds)
            if not ready:
                importlib.import_module(PRELOAD_WHEN_IDLE)
                gc.freeze()
                idle_seconds = None
                continue
            if woken in ready:
                os.read(woken, 1 << 12)
                _bury(agents)
                continue
            received = receive(requests) if launcher not in ready else None
            if received is None:
                return
            idle_seconds = None if PRELOAD_WHEN_IDLE in sys.modules else IDLE_SECONDS
            message, (control, for_children) = received
            pid = os.fork()
            if pid == 0:
                _become_agent(message, control, for_children, (requests.detach(), launcher, woken, wake))
            agents.add(pid)
            os.close(control)
            os.close(for_children)


def _bury(agents: set[int]) -> None:
    """Take note of agents that have ended, and kill what those have left that could not do so themselves."""
    left_something = False
    for pid, status in agent.reap():
        left_something |= pid not in agents or status != 0
        agents.discard(pid)
    if left_something:
        for orphan in psutil.Process().children():
            if orphan.pid not in agents:
                agent.end_tree(orphan, and_janitors=True)
                with contextlib.suppress(psutil.NoSuchProcess):
                    orphan.kill()


def _become_agent(message: ForkAgent, control: int, requests: int, of_server: tuple[int, ...]) -> NoReturn:
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        for descriptor in of_server:
            os.close(descriptor)
        inherit(socket.socket(fileno=requests))
        os.sched_setaffinity(0, message.cores)
        if message.umask is not None:
            os.umask(message.umask)
        channel = socket.socket(fileno=control)  # closed by the exit, so that the launcher sees that
        agent.serve(channel, message.launcher_pid)
        code = 0
    except BaseException:
        with contextlib.suppress(Exception):
            traceback.print_exc()
    finally:
        os._exit(code)
