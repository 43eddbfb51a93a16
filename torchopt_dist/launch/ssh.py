"""``user@host:port``, a command → a process there, and a socket that is its standard input and output.

asyncssh does the work: keys and agents, known hosts, and what ``~/.ssh/config`` says of names, users, ports and jump
hosts. Its event loop runs in a thread.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import importlib
import logging
import os
import re
import socket
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from torchopt_dist.errors import InitializationError

__all__ = ["SshProcess", "check_name"]

T = TypeVar("T")

log = logging.getLogger(__package__)

NAME = re.compile(
    r"(?:(?P<user>[^@\s]+)@)?(?P<host>[^@:\s\[\]]+|\[[0-9a-fA-F:.%\w]+\])(?::(?P<port>\d{1,5}))?"
)
CHUNK = 1 << 18
ALL_THAT_HAS_COME = 1 << 22
"""Bytes, more than SSH's window. asyncssh opens the whole window again for each part of it that is read, so reading a
part at a time would fill the memory with what a fast writer writes."""
LAST_LINES = 30
CLOSE_SECONDS = 2.0

_loop: tuple[int, asyncio.AbstractEventLoop] | None = None
"""The loop, and the process that it runs in: threads do not survive a fork."""
_lock = threading.Lock()


def check_name(name: str) -> None:
    """Hold a host to the form ``[user@]host[:port]``.

    Raises:
        ValueError: it has another form.
    """
    match = NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"`hosts` must hold names of the form [user@]host[:port], got {name!r}")
    if match["port"] and not 0 < int(match["port"]) < 1 << 16:
        raise ValueError(f"`hosts` must hold names whose ports are in [1, 65536), got {name!r}")


class SshProcess:
    """A process on another host.

    Args:
        name: ``[user@]host[:port]``, or what the configuration file calls it.
        command: for the shell there.
        config: a configuration file; ``None`` means ``~/.ssh/config``.
        seconds: for the connection and the login.

    Raises:
        InitializationError: the host is unknown, cannot be reached, is not the one that is known, or refuses.

    Attributes:
        stream: our end of its standard input and output. It is for the one who uses it to close.
    """

    def __init__(self, name: str, command: str, config: str | None, seconds: float) -> None:
        self._name = name
        self._said: collections.deque[str] = collections.deque(maxlen=LAST_LINES)
        self.stream, self._theirs = socket.socketpair()
        try:
            self._ended = _in_loop(self._connect(command, config, seconds))
        except BaseException:
            self.stream.close()
            self._theirs.close()
            raise

    def how_it_ended(self) -> str:
        """How the process ended, if it did, and the last that it said on standard error."""
        how = "the connection is there"
        with contextlib.suppress(TimeoutError):
            how = _in_loop(_within(self._ended, CLOSE_SECONDS))
        said = "\n".join(f"    {line}" for line in self._said)
        return how + (f"; it said:\n{said}" if said else "")

    async def _connect(self, command: str, config: str | None, seconds: float) -> asyncio.Task[str]:
        asyncssh = _asyncssh()
        match = NAME.fullmatch(self._name)
        assert match is not None
        options: dict[str, Any] = {"username": match["user"], "port": match["port"] and int(match["port"])}
        options = {key: value for key, value in options.items() if value}
        if config is not None:
            options["config"] = [config]
        try:
            async with asyncio.timeout(seconds):
                connection = await asyncssh.connect(match["host"].strip("[]"), **options)
                process = await connection.create_process(command, encoding=None)
        except Exception as error:
            raise InitializationError(
                f"{self._name} cannot be reached by SSH: {_why(error, seconds)}"
            ) from error
        return asyncio.create_task(self._carry(connection, process))

    async def _carry(self, connection: Any, process: Any) -> str:
        """Carry bytes both ways until the process ends or :attr:`stream` is closed."""
        loop = asyncio.get_running_loop()
        self._theirs.setblocking(False)

        async def there() -> None:
            while data := await loop.sock_recv(self._theirs, CHUNK):
                process.stdin.write(data)
                await process.stdin.drain()
            process.stdin.write_eof()

        async def back() -> None:
            while data := await process.stdout.read(ALL_THAT_HAS_COME):
                await loop.sock_sendall(self._theirs, data)

        async def listen() -> None:
            async for line in process.stderr:
                text = line.decode("utf-8", "replace").rstrip()
                if text:
                    self._said.append(text)
                    log.warning("%s: %s", self._name, text)

        tasks = [asyncio.create_task(part) for part in (there(), back())]
        listener = asyncio.create_task(listen())
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            with contextlib.suppress(TimeoutError, _asyncssh().Error):  # such as a lost connection
                await asyncio.wait_for(process.wait_closed(), CLOSE_SECONDS)
                await listener
        finally:
            for task in (*tasks, listener):
                task.cancel()
            await asyncio.gather(*tasks, listener, return_exceptions=True)
            self._theirs.close()
            process.close()
            connection.close()
        if process.exit_signal:
            return f"its relay was ended by SIG{process.exit_signal[0]}"
        if process.exit_status is not None:
            return f"its relay exited with code {process.exit_status}"
        return "the SSH connection was lost"


def _why(error: Exception, seconds: float) -> str:
    asyncssh = _asyncssh()
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


def _asyncssh() -> Any:
    try:
        return importlib.import_module("asyncssh")
    except ImportError as error:
        raise InitializationError(
            "launching on other hosts needs asyncssh: pip install 'torchopt_dist[ssh]'"
        ) from error


async def _within(task: asyncio.Task[T], seconds: float) -> T:
    return await asyncio.wait_for(asyncio.shield(task), seconds)


def _in_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in the thread, and wait for it."""
    global _loop
    with _lock:
        if _loop is None or _loop[0] != os.getpid():
            loop = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="todist ssh", daemon=True).start()
            _loop = (os.getpid(), loop)
            logging.getLogger("asyncssh").setLevel(logging.WARNING)
    return asyncio.run_coroutine_threadsafe(work, _loop[1]).result()
