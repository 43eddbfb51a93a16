"""Names of hosts → machines: this one, and others, each with a forkserver that stays for later launches.

A machine has cores and GPUs, and connections to new agents can be made on it.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import logging
import os
import re
import shlex
import socket
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch

from torchopt_dist.errors import InitializationError
from torchopt_dist.launching import _forkserver as forkserver
from torchopt_dist.launching import _processes as processes
from torchopt_dist.launching._connections import (
    Connection,
    ShellConnection,
    carry,
    in_loop,
    log_in,
)
from torchopt_dist.launching._forkserver import MARK, PROGRAM, versions
from torchopt_dist.launching._settings import import_path, matching
from torchopt_dist.process.liveness import Liveness
from torchopt_dist.process.network import LOOPBACK

__all__ = [
    "Machine",
    "RemoteMachine",
    "RemoteOptions",
    "ThisMachine",
    "is_this_machine",
]

log = logging.getLogger(__package__)

COPY_ON_START = ("LD_LIBRARY_PATH", "PYTHON*")
COMMAND_NOT_FOUND = 127
LAST_LINES = 30
CLOSE_SECONDS = 2.0


class Machine(ABC):
    """A machine, this one or another.

    Attributes:
        name: its name in errors.
        here: whether it is this machine.
        cores: the number of processor cores that workers may use.
        gpus: the number of its GPUs.
        env: the environment that programs have there.
        path: ``sys.path`` there.
        address: the address at which the launcher reaches it.
        launcher_address: the address at which it reaches the launcher, if there is no jump host between them.
    """

    name: str
    here: bool
    cores: int
    gpus: int
    env: Mapping[str, str]
    path: list[str]
    address: str = LOOPBACK
    launcher_address: str = LOOPBACK

    @abstractmethod
    def connect(self, env: Mapping[str, str]) -> socket.socket:
        """A connection to a new agent there.

        Args:
            env: the environment that its workers will have.

        Raises:
            OSError: the system lets no process be started, or no file be opened.
        """

    @abstractmethod
    def kill(self, pid: int) -> None:
        """Kill a process that gives no sign of life: a worker, or an agent, whose workers end with it."""

    def why_lost(self, seconds: float = 0.0) -> str | None:
        """The reason for which the machine cannot be reached any more; ``None`` while it can.

        Args:
            seconds: how long to wait for the reason to become known.
        """
        return None


class ThisMachine(Machine):
    """The machine that the launcher runs on."""

    name = "this machine"
    here = True

    def __init__(self) -> None:
        self.cores, self.gpus = len(os.sched_getaffinity(0)), torch.cuda.device_count()
        self.env, self.path = dict(os.environ), list(sys.path)

    def connect(self, env: Mapping[str, str]) -> socket.socket:
        """A connection to an agent that this process's own forkserver forks."""
        return forkserver.connect(env)

    def kill(self, pid: int) -> None:
        """Kill a process."""
        processes.kill(pid)


def is_this_machine(name: str) -> bool:
    """Whether a host is this machine, under one of its names or addresses."""
    own = socket.gethostname()
    addresses = {a.address for known in psutil.net_if_addrs().values() for a in known}
    return name in {"localhost", "127.0.0.1", "::1", own, own.partition(".")[0]} | addresses


# Other machines.


@dataclass(frozen=True)
class RemoteOptions:
    """The settings by which other hosts are reached.

    Attributes:
        python: the interpreter there.
        config: SSH's configuration file; ``None`` means ``~/.ssh/config``.
        shell: a command that runs a command on a host; ``None`` means SSH.
        otherwise: the command where no host is reached by SSH; ``None``: that is an error.
        liveness: how often both sides give signs of life, and after how long without one the other counts as lost.
        env: variables for workers there, in addition to those that programs there have.
    """

    python: str
    config: str | None
    shell: str | None
    otherwise: str | None
    liveness: Liveness
    env: Mapping[str, str] = field(compare=False)


class RemoteMachine(Machine):
    """A machine with a forkserver that has greeted; :meth:`start` makes one.

    Args:
        name: ``[user@]host[:port]``.
        options: how it is reached.
        connection: the connection to it.
        process: its forkserver, a process of that connection.
    """

    here = False

    def __init__(self, name: str, options: RemoteOptions, connection: Connection, process: Any) -> None:
        self.name = name
        self._options, self._connection, self._process = options, connection, process
        self._last_lines: collections.deque[str] = collections.deque(maxlen=LAST_LINES)
        self._listener = asyncio.create_task(self._listen())
        self._supervisor: asyncio.Task[None] | None = None
        self._why_lost: str | None = None
        self._lost = threading.Event()

    @classmethod
    async def start(cls, name: str, options: RemoteOptions, seconds: float) -> RemoteMachine:
        """Log in, and start a forkserver.

        Args:
            name: ``[user@]host[:port]``.
            options: how it is reached.
            seconds: the time limit of the login, and that of the forkserver's greeting.

        Raises:
            InitializationError: the host cannot be reached, or lacks what a launch needs.
        """
        until = asyncio.get_running_loop().time() + seconds
        connection: Connection
        if options.shell is None:
            connection = await log_in(name, options.config, options.liveness.patience, seconds)
        else:
            connection = ShellConnection(name, options.shell)
        try:
            async with asyncio.timeout_at(until):
                command = f"exec {shlex.quote(options.python)} -u -c {shlex.quote(PROGRAM)}"
                machine = cls(name, options, connection, await connection.run(command))
                await machine._greet()
        except BaseException as error:
            connection.abort()
            if not isinstance(error, TimeoutError):
                raise
            what = f"did not start within `start_timeout`, {seconds:g} s: give more where machines are busy"
            raise InitializationError(f"Python on {name} {what}") from None
        machine._supervisor = asyncio.create_task(machine._supervise())
        return machine

    async def _greet(self) -> None:
        base = matching(COPY_ON_START, os.environ)
        start: dict[str, Any] = {
            "env": {**base, **self._options.env},
            "base": base,
            "path": [os.path.abspath(entry) for entry in import_path()],
            "folder": os.getcwd(),
            "launcher": f"{socket.gethostname()}:{os.getpid()}",
            "patience": self._options.liveness.patience,
        }
        with contextlib.suppress(OSError):  # it has ended: its greeting will be missed
            self._process.stdin.write(json.dumps(start).encode() + b"\n")
        try:
            await self._process.stdout.readuntil(MARK)
            greeting = json.loads(await self._process.stdout.readuntil(b"\n"))
        except asyncio.IncompleteReadError:
            raise InitializationError(await self._no_greeting()) from None
        self._check(greeting, start["folder"])
        self.cores, self.gpus = greeting["cores"], greeting["gpus"]
        self.env, self.path = greeting["env"], greeting["path"]
        self.address, self.launcher_address = greeting["address"], greeting["launcher_address"]
        self._socket = greeting["socket"]

    async def _no_greeting(self) -> str:
        python, how = self._options.python, await self._how_it_ended()
        if f"code {COMMAND_NOT_FOUND}" in how:
            return f"{self.name} has no {python}; `python` says which interpreter to run there: {how}"
        missing = re.search(r"No module named '([\w.]+)'", how)
        if missing:
            return f"{python} on {self.name} has no package {missing[1]}: install it there; {how}"
        return f"{python} did not start on {self.name}{self._connection.by}: {how}"

    def _check(self, greeting: dict[str, Any], folder: str) -> None:
        for what, ours in versions().items():
            theirs = greeting["versions"].get(what)
            if theirs != ours:
                raise InitializationError(
                    f"all hosts must have the same {what}, and {self.name} has {theirs}, this machine {ours}"
                )
        if not greeting["has_folder"]:
            raise InitializationError(
                f"the working folder must be on all hosts, and {folder} is not on {self.name}"
            )

    async def _supervise(self) -> None:
        """Give signs of life, until the forkserver or the connection has ended."""
        ended = asyncio.create_task(self._connection.wait(self._process))
        try:
            while not ended.done():
                if not self._process.stdin.is_closing():  # or asyncio warns, over and over
                    with contextlib.suppress(OSError):
                        self._process.stdin.write(b"\0")
                await asyncio.wait([ended], timeout=self._options.liveness.between_signs)
            self._why_lost = await self._how_it_ended()
        finally:
            self._why_lost = self._why_lost or "it was closed"
            self._lost.set()
            self._connection.abort()

    async def _listen(self) -> None:
        async for line in self._process.stderr:
            text = line.decode("utf-8", "replace").rstrip()
            if text:
                self._last_lines.append(text)
                log.warning("%s: %s", self.name, text)

    async def _how_it_ended(self) -> str:
        """How the forkserver ended, and the last lines of its standard error."""
        why = self._connection.silence
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._connection.wait(self._process)
                await self._listener
        except Exception as error:
            if "keepalive" in str(error):
                why = f"there was no sign of life for {self._options.liveness.patience:g} s"
        code = self._process.returncode
        if code is None:
            return why
        how = f"was ended by {processes.signal_name(-code)}" if code < 0 else f"exited with code {code}"
        return "\n    ".join(
            [f"its forkserver {how}" + ("; it said:" if self._last_lines else ""), *self._last_lines]
        )

    def connect(self, env: Mapping[str, str]) -> socket.socket:
        """A connection to an agent that the forkserver there forks."""
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        in_loop(self._carry(theirs))
        return ours

    async def _carry(self, end: socket.socket) -> None:
        try:
            stream = await self._connection.open(self._socket, self._options.python)
        except Exception as error:
            if not self._lost.is_set():
                log.warning("%s: there is no way to the forkserver: %s", self.name, error)
            end.close()
        else:
            await carry(end, *stream)

    def kill(self, pid: int) -> None:
        """Kill a process on the machine."""
        in_loop(self._run(f"kill -9 {pid}"))

    async def _run(self, command: str) -> None:
        await self._connection.wait(await self._connection.run(command))

    def why_lost(self, seconds: float = 0.0) -> str | None:
        """The reason for which the connection or the forkserver has ended; ``None`` if neither has.

        Args:
            seconds: how long to wait for the reason to become known.
        """
        return self._why_lost if self._lost.wait(seconds) else None

    async def close(self) -> None:
        """End the connection, and with it the forkserver and everything that it has started."""
        self._connection.close()
        if self._supervisor is not None:
            await self._supervisor
