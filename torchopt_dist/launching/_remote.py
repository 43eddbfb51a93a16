"""Names of hosts → machines, reached by SSH or a command, each with a forkserver that stays for later launches."""

from __future__ import annotations

import asyncio
import atexit
import collections
import contextlib
import json
import logging
import os
import re
import shlex
import socket
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torchopt_dist.errors import InitializationError
from torchopt_dist.launching._environment import chosen_by, import_path
from torchopt_dist.launching._forkserver import MARK, PROGRAM, read_on_import, versions
from torchopt_dist.launching._machine import Machine
from torchopt_dist.launching._shell import connect_by_shell
from torchopt_dist.launching._ssh import UnreachedError, carry, in_loop, log_in, open_stream
from torchopt_dist.process.liveness import Liveness

__all__ = ["RemoteMachine", "RemoteOptions", "close_all", "connect"]

log = logging.getLogger(__package__)

COPY_ON_START = ("LD_LIBRARY_PATH", "PYTHON*")
COMMAND_NOT_FOUND = 127
LAST_LINES = 30
CLOSE_SECONDS = 2.0
A_DAY = 86400.0


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
        connection: the connection to it, an object of asyncssh or one like it.
        process: its forkserver, an object of asyncssh or one like it.
    """

    here = False

    def __init__(self, name: str, options: RemoteOptions, connection: Any, process: Any) -> None:
        self.name = name
        self._options, self._connection, self._process = options, connection, process
        self._said: collections.deque[str] = collections.deque(maxlen=LAST_LINES)
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
        connection: Any
        if options.shell is None:
            connection = await log_in(name, options.config, options.liveness.patience, seconds)
        else:
            connection = connect_by_shell(name, options.shell)
        try:
            async with asyncio.timeout_at(until):
                command = f"exec {shlex.quote(options.python)} -u -c {shlex.quote(PROGRAM)}"
                machine = cls(
                    name, options, connection, await connection.create_process(command, encoding=None)
                )
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
        base = chosen_by(COPY_ON_START, os.environ)
        start: dict[str, Any] = {
            "env": {**base, **self._options.env},
            "base": base,
            "path": [os.path.abspath(entry) for entry in import_path()],
            "folder": os.getcwd(),
            "launcher": f"{socket.gethostname()}:{os.getpid()}",
            "patience": min(self._options.liveness.patience, A_DAY),  # more than a selector can wait for
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
        by = "" if self._options.shell is None else f" by {self._connection}"
        return f"{python} did not start on {self.name}{by}: {how}"

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
        ended = asyncio.create_task(self._process.wait_closed())
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
                self._said.append(text)
                log.warning("%s: %s", self.name, text)

    async def _how_it_ended(self) -> str:
        """How the forkserver ended, and the last lines of its standard error."""
        why = (
            "the SSH connection was lost"
            if self._options.shell is None
            else f"{self._connection} gives no answer"
        )
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._process.wait_closed()
                await self._listener
        except Exception as error:
            if "keepalive" in str(error):
                why = f"there was no sign of life for {self._options.liveness.patience:g} s"
        if self._process.exit_signal:
            why = f"its forkserver was ended by SIG{self._process.exit_signal[0]}"
        elif self._process.exit_status is not None:
            why = f"its forkserver exited with code {self._process.exit_status}"
        else:
            return why
        return "\n    ".join([f"{why}; it said:", *self._said]) if self._said else why

    def connect(self, env: Mapping[str, str]) -> socket.socket:
        """A connection to an agent that the forkserver there forks."""
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        in_loop(self._carry(theirs))
        return ours

    async def _carry(self, end: socket.socket) -> None:
        try:
            stream = await open_stream(self._connection, self._socket, self._options.python)
        except Exception as error:
            if not self._lost.is_set():
                log.warning("%s: there is no way to the forkserver: %s", self.name, error)
            end.close()
        else:
            await carry(end, *stream)

    def kill(self, pid: int) -> None:
        """Kill a process on the machine."""
        in_loop(self._connection.run(f"kill -9 {pid}"))

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


_Key = tuple[int, str, RemoteOptions, tuple[tuple[str, str], ...]]
_machines: dict[_Key, asyncio.Task[RemoteMachine]] = {}
"""What has been reached, or is about to be: by process, name, options, and the variables that libraries read there."""


def connect(
    names: Sequence[str],
    options: RemoteOptions,
    seconds: float,
    otherwise: Callable[[str, str], Machine] | None = None,
) -> dict[str, Machine]:
    """Reach hosts, all at once. Connections of an earlier launch are used again.

    Args:
        names: ``[user@]host[:port]``, each.
        options: the settings.
        seconds: the time limit for all of them together.
        otherwise: a function from the name of a host that cannot be reached, and the reason, to a machine in its place;
            ``None``: such a host is an error.

    Raises:
        InitializationError: a host cannot be reached, or lacks what a launch needs.
    """
    machines: dict[str, Machine] = {}
    errors: list[BaseException] = []
    reach = _reach_all if options.otherwise is None else _reach_job
    reached = in_loop(reach(names, options, seconds)).result()
    for name, found in zip(names, reached, strict=True):
        if isinstance(found, Machine):
            machines[name] = found
        elif otherwise is not None and isinstance(found, InitializationError):
            machines[name] = otherwise(name, str(found))
        else:
            errors.append(found)
    if len(errors) > 1 and all(isinstance(error, InitializationError) for error in errors):
        raise InitializationError("\n".join(map(str, errors))) from errors[0]
    for error in errors:
        raise error
    return machines


async def _reach_job(
    names: Sequence[str], by_ssh: RemoteOptions, seconds: float
) -> list[RemoteMachine | BaseException]:
    """Reach hosts of a job by SSH or, if it reaches none, by a command; later ones in the way that has worked."""
    assert by_ssh.otherwise is not None
    by_command = replace(by_ssh, shell=by_ssh.otherwise, otherwise=None)
    ways = {options for pid, _, options, _ in _machines if pid == os.getpid()}
    if by_command in ways:
        return await _reach_all(names, by_command, seconds)
    found = await _reach_all(names, by_ssh, seconds)
    if by_ssh in ways:
        return found
    if any(not isinstance(each, UnreachedError) for each in found):
        log.info("the hosts of the job are reached by SSH")
        return found
    log.warning("%s; so %s starts what runs on the hosts", found[0], by_ssh.otherwise)
    second = await _reach_all(names, by_command, seconds)
    return [
        InitializationError(f"{first}\n{each}") if isinstance(each, InitializationError) else each
        for first, each in zip(found, second, strict=True)
    ]


async def _reach_all(
    names: Sequence[str], options: RemoteOptions, seconds: float
) -> list[RemoteMachine | BaseException]:
    loaded = tuple(sorted(read_on_import(options.env).items()))
    tasks = []
    for name in names:
        key = (os.getpid(), name, options, loaded)
        task = _machines.get(key)
        if task is None or (task.done() and (task.exception() or task.result().why_lost() is not None)):
            task = _machines[key] = asyncio.create_task(RemoteMachine.start(name, options, seconds))
        tasks.append(task)
    # A host is kept though the launch may be interrupted; another launch may wait for it.
    found = await asyncio.gather(*map(asyncio.shield, tasks), return_exceptions=True)
    for known, task in list(_machines.items()):
        if task.done() and task.exception() is not None:
            _machines.pop(known, None)
    return found


def close_all(names: Collection[str] | None = None) -> None:
    """End the connections of this process.

    Args:
        names: the hosts whose connections end; ``None`` means all.
    """
    keys = [key for key in _machines if key[0] == os.getpid() and (names is None or key[1] in names)]
    tasks = [_machines.pop(key) for key in keys]
    if tasks:
        with contextlib.suppress(TimeoutError):
            in_loop(_close(tasks)).result(CLOSE_SECONDS)


async def _close(tasks: list[asyncio.Task[RemoteMachine]]) -> None:
    machines = [task.result() for task in tasks if task.done() and not task.exception()]
    await asyncio.gather(*(machine.close() for machine in machines))


atexit.register(close_all)
