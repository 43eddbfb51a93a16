"""Names of hosts → machines, reached by SSH, each with a relay that stays for later launches."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import pickle
import re
import shlex
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchopt_dist.errors import InitializationError
from torchopt_dist.launch.at_once import at_once
from torchopt_dist.launch.environment import chosen_by, import_path
from torchopt_dist.launch.ferry import NO_LIFE, Ferry
from torchopt_dist.launch.machine import Machine
from torchopt_dist.launch.messages import KillAgent, OpenAgent, OpenMeeting
from torchopt_dist.launch.relay import MARK, PROGRAM, versions
from torchopt_dist.launch.ssh import SshProcess

__all__ = ["PATIENCE", "START_SECONDS", "SshOptions", "connect"]

MOST_BEFORE_GREETING = 1 << 20
CHUNK = 1 << 16
COPY_ON_START = ("LD_LIBRARY_PATH", "PYTHON*")
COMMAND_NOT_FOUND = 127
TELL_SECONDS = 5.0
PATIENCE, START_SECONDS = 5.0, 120.0
"""Unless a launcher says otherwise."""


@dataclass(frozen=True)
class SshOptions:
    """How other hosts are reached.

    Attributes:
        python: the interpreter there.
        config: SSH's configuration file; ``None`` means ``~/.ssh/config``.
        patience: seconds without a sign of life after which a host counts as lost, for both sides.
    """

    python: str
    config: str | None
    patience: float


class RemoteMachine(Machine):
    """A machine with a relay that has greeted.

    Args:
        name: ``[user@]host[:port]``.
        options: how it is reached.
        seconds: for the login, and for the relay's greeting.

    Raises:
        InitializationError: it cannot be reached, or lacks what a launch needs.
    """

    here = False

    def __init__(self, name: str, options: SshOptions, seconds: float) -> None:
        self.name = name
        until = time.monotonic() + seconds
        command = f"exec {shlex.quote(options.python)} -u -c {shlex.quote(PROGRAM)}"
        self._process = SshProcess(name, command, options.config, seconds)
        stream = self._process.stream
        try:
            start: dict[str, Any] = {
                "env": chosen_by(COPY_ON_START, os.environ),
                "path": [os.path.abspath(entry) for entry in import_path()],
                "folder": os.getcwd(),
                "launcher": f"{socket.gethostname()}:{os.getpid()}",
                "patience": options.patience,
            }
            with contextlib.suppress(OSError):  # it has ended: its greeting will be missed
                stream.sendall(json.dumps(start).encode() + b"\n")
            greeting, early = self._greeting(options, until, seconds)
            self._check(greeting, start["folder"])
        except BaseException:
            stream.close()
            raise
        self.cores, self.gpus = greeting["cores"], greeting["gpus"]
        self.env, self.path = greeting["env"], greeting["path"]
        self.address, self.launcher_address = greeting["address"], greeting["launcher_address"]
        self._why_lost: str | None = None
        self._told = threading.Event()
        descriptor = stream.detach()
        self._ferry = Ferry(descriptor, descriptor, odd=True, patience=options.patience, early=early)
        threading.Thread(target=self._carry, name=f"todist ferry to {name}", daemon=True).start()

    def request_agent(self, env: Mapping[str, str]) -> socket.socket:
        """Have an agent forked there."""
        return self._ferry.open(pickle.dumps(OpenAgent(dict(env))))

    def open_meeting(self) -> socket.socket:
        """A channel to a thread of the relay."""
        return self._ferry.open(pickle.dumps(OpenMeeting()))

    def kill_agent(self, pid: int) -> None:
        """Have the relay kill an agent."""
        self._ferry.open(pickle.dumps(KillAgent(pid))).close()

    @property
    def held_up_at(self) -> float:
        """When what came from there was last held up here."""
        return self._ferry.held_up_at

    def why_lost(self) -> str | None:
        """Why the connection has ended, if it has."""
        if not self._ferry.ended:
            return None
        self._told.wait(TELL_SECONDS)
        return self._why_lost

    def close(self) -> None:
        """End the connection, and with it the relay and everything that it has started."""
        self._ferry.close()
        self._told.wait(TELL_SECONDS)

    def _carry(self) -> None:
        try:
            why = self._ferry.run()
            self._why_lost = why if why.startswith(NO_LIFE) else self._process.how_it_ended()
        finally:
            self._told.set()

    def _greeting(self, options: SshOptions, until: float, seconds: float) -> tuple[dict[str, Any], bytes]:
        """The relay's greeting, and what came after it."""
        stream, data = self._process.stream, b""
        while True:
            before, mark, after = data.partition(MARK)
            line, newline, rest = after.partition(b"\n")
            if newline:
                stream.settimeout(None)
                return json.loads(line), rest
            stream.settimeout(max(until - time.monotonic(), 0.001))
            try:
                more = stream.recv(CHUNK)
            except TimeoutError:
                raise InitializationError(
                    f"Python on {self.name} did not start within `start_timeout`, {seconds:g} s"
                ) from None
            except ConnectionError:
                more = b""
            if not more or (not mark and len(before) > MOST_BEFORE_GREETING):
                raise InitializationError(self._no_greeting(options))
            data += more

    def _no_greeting(self, options: SshOptions) -> str:
        how = self._process.how_it_ended()
        if f"code {COMMAND_NOT_FOUND}" in how:
            return f"{self.name} has no {options.python}; `python` says which interpreter to run there: {how}"
        missing = re.search(r"No module named '([\w.]+)'", how)
        if missing:
            return f"{options.python} on {self.name} has no package {missing[1]}: install it there; {how}"
        return f"{options.python} did not start on {self.name}: {how}"

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


_machines: dict[tuple[int, str, SshOptions], RemoteMachine] = {}


def connect(names: Sequence[str], options: SshOptions, seconds: float) -> dict[str, RemoteMachine]:
    """Reach hosts, all at once. Those that an earlier launch has reached are still there.

    Args:
        names: ``[user@]host[:port]``, each.
        options: how.
        seconds: for all of them.

    Raises:
        InitializationError: some host cannot be reached, or lacks what a launch needs.
    """
    keys = {name: (os.getpid(), name, options) for name in names}
    for key, machine in list(_machines.items()):
        if machine.why_lost() is not None:
            _machines.pop(key, None)
    there = {name: _machines[key] for name, key in keys.items() if key in _machines}

    def reach(name: str) -> RemoteMachine | InitializationError:
        try:
            machine = RemoteMachine(name, options, seconds)
        except InitializationError as error:
            return error
        # It is kept though the launch may have been interrupted; another launch may have reached the host meanwhile.
        kept = _machines.setdefault(keys[name], machine)
        if kept is not machine:
            machine.close()
        return kept

    new = [name for name in keys if name not in there]
    errors = []
    for name, found in zip(new, at_once(reach, new), strict=True):
        if isinstance(found, InitializationError):
            errors.append(found)
        else:
            there[name] = found
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise InitializationError("\n".join(map(str, errors))) from errors[0]
    return {name: there[name] for name in keys}


@atexit.register
def _close_all() -> None:
    mine = [machine for (pid, _, _), machine in list(_machines.items()) if pid == os.getpid()]
    _machines.clear()
    for machine in mine:
        machine.close()
