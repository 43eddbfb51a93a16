"""The name of a host → a connection: commands that run there, and streams to sockets there.

There are two kinds: SSH, and a command that runs commands on a host, such as ``srun -w {host}``. asyncssh handles keys
and agents, known hosts, and the names, users, ports and jump hosts of ``~/.ssh/config``. All of it runs in the event
loop of one thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import shlex
import signal
import socket
import threading
from abc import ABC, abstractmethod
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from torchopt_dist.errors import InitializationError
from torchopt_dist.process import slurm

__all__ = [
    "Connection",
    "SSHConnection",
    "ShellConnection",
    "UnreachedError",
    "carry",
    "check_name",
    "check_shell",
    "in_loop",
    "log_in",
]

T = TypeVar("T")

HOST, STEP_OF_JOB = "{host}", "srun"
"""In a command: where the name of the host is to stand; a step of the SLURM job."""
LIMIT = 1 << 24
"""Bytes that a greeting may have: all variables and paths of the host are in it."""
END_SECONDS = 0.6
"""Until a command that has been asked to end is asked once more: by its standard input, SIGTERM, SIGKILL."""
NAME = re.compile(
    r"(?:(?P<user>[^@\s]+)@)?(?P<host>[^@:\s\[\]]+|\[[0-9a-fA-F:.%\w]+\])(?::(?P<port>\d{1,5}))?"
)
CHUNK = 1 << 18
ALL_THAT_HAS_COME = 1 << 22
"""Bytes, more than SSH's window. asyncssh opens the whole window again for each part of it that is read, so reading a
part at a time would fill the memory with what a fast writer writes."""
QUESTIONS = 4
"""Hosts are asked whether they are there so often before they count as lost."""
PAUSES = (0.1, 0.4, 1.6)
"""Seconds before a login that was cut off is tried again: a server drops some while many log in (MaxStartups)."""
TO_SOCKET = (
    "import os,select,socket,sys\n"
    "there=socket.socket(socket.AF_UNIX);there.connect(sys.argv[1])\n"
    "while True:\n"
    " for end in select.select([0,there],[],[])[0]:\n"
    "  data=os.read(0,1<<16) if end==0 else there.recv(1<<16)\n"
    "  if not data: os._exit(0)\n"
    "  if end==0: there.sendall(data)\n"
    "  while end!=0 and data: data=data[os.write(1,data):]\n"
)
"""A program that connects its standard input and output to a socket."""

_loop: tuple[int, asyncio.AbstractEventLoop] | None = None
"""The loop, and the process that it runs in: threads do not survive a fork."""
_lock = threading.Lock()


class UnreachedError(InitializationError):
    """Raised if a host cannot be reached by SSH."""


def check_name(name: str) -> None:
    """Check that a host has the form ``[user@]host[:port]``.

    Raises:
        ValueError: it has another form.
    """
    match = NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"`hosts` must hold names of the form [user@]host[:port], got {name!r}")
    if match["port"] and not 0 < int(match["port"]) < 1 << 16:
        raise ValueError(f"`hosts` must hold names whose ports are in [1, 65536), got {name!r}")


def check_shell(option: str, shell: str) -> None:
    """Check the command.

    Raises:
        ValueError: its quotes do not end, or it does not say where the name of the host is to stand.
    """
    try:
        words = shlex.split(shell)
    except ValueError as error:
        raise ValueError(f"`{option}` must be a command, got {shell!r}: {error}") from None
    if words != [STEP_OF_JOB] and not any(HOST in word for word in words):
        raise ValueError(
            f'`{option}` must be "{STEP_OF_JOB}", or a command with {HOST} where the name of the host is to stand, '
            f"got {shell!r}"
        )


def in_loop(work: Coroutine[Any, Any, T]) -> Future[T]:
    """Run a coroutine in the thread."""
    global _loop
    with _lock:
        if _loop is None or _loop[0] != os.getpid():
            loop = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="todist ssh", daemon=True).start()
            _loop = (os.getpid(), loop)
            logging.getLogger("asyncssh").setLevel(logging.WARNING)
    return asyncio.run_coroutine_threadsafe(work, _loop[1])


class Connection(ABC):
    """A connection to a host.

    Attributes:
        by: how it was made, for errors: nothing, or ``" by `command`"``.
        silence: what is the case if it is lost and nobody says why.
        close: ends all processes there by the ends of their standard inputs, and then the connection.
        abort: ends the connection at once.
    """

    by: str
    silence: str
    close: Callable[[], None]
    abort: Callable[[], None]

    @abstractmethod
    async def run(self, command: str) -> Any:
        """Start a command of the shell on the host.

        Returns:
            A process of asyncio or of asyncssh: ``stdin``, ``stdout`` and ``stderr`` are streams of bytes, and
            ``returncode`` is ``None`` while it runs.

        Raises:
            InitializationError: the program that is to run it cannot be started here.
        """

    async def open(self, path: str, python: str) -> tuple[Any, Any]:
        """Open a stream to a socket on the host: its reader and its writer.

        Args:
            path: the path of the socket.
            python: an interpreter there, that connects its standard input and output to the socket.
        """
        process = await self.run(shlex.join((python, "-S", "-c", TO_SOCKET, path)))
        return process.stdout, process.stdin

    @abstractmethod
    async def wait(self, process: Any) -> None:
        """Wait for the end of a process."""


class SSHConnection(Connection):
    """A connection by SSH.

    Args:
        connection: asyncssh's.
    """

    by, silence = "", "the SSH connection was lost"

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.close, self.abort = connection.close, connection.abort

    async def run(self, command: str) -> Any:
        """Start a command there."""
        return await self._connection.create_process(command, encoding=None)

    async def open(self, path: str, python: str) -> tuple[Any, Any]:
        """Open a stream to a socket there, by a process if the host's SSH server forbids it otherwise."""
        import asyncssh

        try:
            reader, writer = await self._connection.open_unix_connection(path, encoding=None)
        except asyncssh.ChannelOpenError:
            return await super().open(path, python)
        return reader, writer

    async def wait(self, process: Any) -> None:
        """Wait for the end of a process."""
        await process.wait_closed()


class ShellConnection(Connection):
    """A command that runs commands on a host; each process there is one more call of it.

    Args:
        host: the name of the host.
        shell: the command, with ``{host}`` where the name of the host is to stand; or ``"srun"``, a step of this job.

    Raises:
        ValueError: ``shell`` is ``"srun"``, and there is no job.
    """

    def __init__(self, host: str, shell: str) -> None:
        words = shlex.split(shell)
        self._command = (
            slurm.step(host) if words == [STEP_OF_JOB] else [word.replace(HOST, host) for word in words]
        )
        self._processes: list[Process] = []
        self.by = f" by `{shlex.join(self._command)}`"
        self.silence = f"`{shlex.join(self._command)}` gives no answer"

    async def run(self, command: str) -> Process:
        """Start a command there."""
        is_step = self._command[0].rpartition("/")[2] == STEP_OF_JOB
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                *("/bin/sh", "-c", command),
                stdin=PIPE,
                stdout=PIPE,
                stderr=PIPE,
                env=slurm.own_environment() if is_step else None,
                limit=LIMIT,
                start_new_session=True,  # Ctrl-C in the terminal is the launcher's to handle
            )
        except OSError as error:
            raise InitializationError(
                f"`{shlex.join(self._command)}` cannot be started here: {error.strerror}"
            ) from error
        self._processes = [each for each in self._processes if each.returncode is None] + [process]
        return process

    async def wait(self, process: Process) -> None:
        """Wait for the end of a process."""
        await process.wait()

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


async def log_in(name: str, config: str | None, patience: float, seconds: float) -> SSHConnection:
    """Connect to a host by SSH.

    Args:
        name: ``[user@]host[:port]``, or a name of the configuration file.
        config: a configuration file; ``None`` means ``~/.ssh/config``.
        patience: seconds without an answer from the host after which the connection is closed.
        seconds: the time limit of the connection and the login.

    Raises:
        UnreachedError: the host is unknown, cannot be reached, is not the one that is known, or refuses; or there is
            no asyncssh.
    """
    try:
        import asyncssh
    except ImportError as error:
        raise UnreachedError(
            "launching on other hosts needs asyncssh: pip install 'torchopt_dist[ssh]'"
        ) from error
    match = NAME.fullmatch(name)
    assert match is not None
    host, port = match["host"].strip("[]"), match["port"] and int(match["port"])
    named = {"username": match["user"], "port": port, "config": config and [config]}
    options: dict[str, Any] = {key: value for key, value in named.items() if value}
    options |= {"keepalive_interval": patience / QUESTIONS, "keepalive_count_max": QUESTIONS - 1}
    try:
        async with asyncio.timeout(seconds):
            for pause in PAUSES:
                with contextlib.suppress(ConnectionResetError, asyncssh.ConnectionLost):
                    return SSHConnection(await asyncssh.connect(host, **options))
                await asyncio.sleep(pause)
            return SSHConnection(await asyncssh.connect(host, **options))
    except Exception as error:
        raise UnreachedError(f"{name} cannot be reached by SSH: {_why(error, seconds)}") from error


def _why(error: Exception, seconds: float) -> str:
    import asyncssh

    if isinstance(error, asyncssh.PermissionDenied):
        return f"it refuses the login, since no key or agent that is known here is allowed there ({error.reason})"
    if isinstance(error, asyncssh.HostKeyNotVerifiable):
        return f"it is not in the file of known hosts, or has another key than there ({error.reason})"
    if isinstance(error, TimeoutError):
        return f"there was no answer within {seconds:g} s"
    if isinstance(error, socket.gaierror):
        return f"the name is unknown ({error.strerror})"
    if isinstance(error, OSError):
        return str(error.strerror or error) + (f": {error.filename}" if error.filename else "")
    return f"{type(error).__name__}: {error}"


async def carry(end: socket.socket, reader: Any, writer: Any) -> None:
    """Copy bytes both ways between a socket here and a stream of SSH until one of them ends; then both are closed."""
    loop = asyncio.get_running_loop()

    async def there() -> None:
        while data := await loop.sock_recv(end, CHUNK):
            writer.write(data)
            await writer.drain()

    async def back() -> None:
        while data := await reader.read(ALL_THAT_HAS_COME):
            await loop.sock_sendall(end, data)

    tasks = [asyncio.create_task(part) for part in (there(), back())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done() and tasks[0].exception():  # nobody listens there; what was said is still heard
            await asyncio.wait(tasks[1:])
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        end.close()
        with contextlib.suppress(Exception):  # it may be closed
            writer.close()
