"""A command that runs commands on a host, such as ``srun -w {host}`` → what a connection by SSH can do."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from typing import Any

from torchopt_dist.errors import InitializationError
from torchopt_dist.launching import _slurm as slurm

__all__ = ["ShellConnection", "check_shell", "connect_by_shell"]

HOST = "{host}"
OF_THE_JOB = "srun"
"""Means a step of the SLURM job."""
LIMIT = 1 << 24
"""Bytes that a greeting may have: all variables and paths of the host are in it."""
END_SECONDS = 0.6
"""Until a command that has been asked to end is asked once more: by its standard input, SIGTERM, SIGKILL."""


def check_shell(option: str, shell: str) -> None:
    """Check the command.

    Raises:
        ValueError: its quotes do not end, or it does not say where the name of the host is to stand.
    """
    try:
        words = shlex.split(shell)
    except ValueError as error:
        raise ValueError(f"`{option}` must be a command, got {shell!r}: {error}") from None
    if words != [OF_THE_JOB] and not any(HOST in word for word in words):
        raise ValueError(
            f'`{option}` must be "{OF_THE_JOB}", or a command with {HOST} where the name of the host is to stand, '
            f"got {shell!r}"
        )


def connect_by_shell(name: str, shell: str) -> ShellConnection:
    """A connection to a host by a command.

    Args:
        name: the host.
        shell: the command, with ``{host}`` where the name of the host is to stand; or ``"srun"``, a step of this job.

    Raises:
        ValueError: ``shell`` is ``"srun"``, and there is no job.
    """
    words = shlex.split(shell)
    command = slurm.step(name) if words == [OF_THE_JOB] else [word.replace(HOST, name) for word in words]
    return ShellConnection(command)


class ShellProcess:
    """A process on a host, as asyncssh has it."""

    exit_signal = None

    def __init__(self, process: Process) -> None:
        self._process = process
        self.stdin, self.stdout, self.stderr = process.stdin, process.stdout, process.stderr

    @property
    def exit_status(self) -> int | None:
        """The exit code of the command that runs it; ``None`` while it runs."""
        return self._process.returncode

    async def wait_closed(self) -> None:
        """Wait for its end."""
        await self._process.wait()


class ShellConnection:
    """The parts of asyncssh's connection that a launch needs; each process is one more call of the command.

    Args:
        command: what stands before a command for the host.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)
        self._processes: list[Process] = []

    def __str__(self) -> str:
        return f"`{shlex.join(self._command)}`"

    async def create_process(self, command: str, encoding: None = None) -> ShellProcess:
        """Start a command of the shell on the host.

        Args:
            command: the command.
            encoding: bytes, not text, are read and written.

        Raises:
            InitializationError: the program that is to run it cannot be started here.
        """
        env = slurm.own_environment() if self._command[0].rpartition("/")[2] == "srun" else None
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                *("/bin/sh", "-c", command),
                stdin=PIPE,
                stdout=PIPE,
                stderr=PIPE,
                env=env,
                limit=LIMIT,
                start_new_session=True,  # Ctrl-C in the terminal is the launcher's to handle
            )
        except OSError as error:
            raise InitializationError(f"{self} cannot be started here: {error.strerror}") from error
        self._processes = [each for each in self._processes if each.returncode is None] + [process]
        return ShellProcess(process)

    async def open_unix_connection(self, path: str, encoding: None = None) -> Any:
        """Raise: the caller starts a process there that connects."""
        raise NotImplementedError

    async def run(self, command: str) -> None:
        """Run a command on the host to its end."""
        await (await self.create_process(command)).wait_closed()

    def close(self) -> None:
        """End all processes there by the ends of their standard inputs, and then the commands that run them."""
        for process in self._processes:
            if process.returncode is None and process.stdin is not None:
                process.stdin.close()
        asyncio.get_running_loop().call_later(END_SECONDS, self.abort)

    def abort(self) -> None:
        """End the commands. ``srun`` waits for what it has started, even on a node that is down, until it is killed."""
        self._signal(signal.SIGTERM)
        asyncio.get_running_loop().call_later(END_SECONDS, self._signal, signal.SIGKILL)

    def _signal(self, number: int) -> None:
        for process in self._processes:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(number)
