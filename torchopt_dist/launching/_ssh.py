"""``user@host:port`` → an SSH connection, processes there, and sockets that are connected to sockets there.

asyncssh handles keys and agents, known hosts, and the names, users, ports and jump hosts of ``~/.ssh/config``. Its
event loop runs in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import shlex
import socket
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from torchopt_dist.errors import InitializationError

__all__ = ["UnreachedError", "carry", "check_name", "in_loop", "log_in", "open_stream"]

T = TypeVar("T")

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


async def log_in(name: str, config: str | None, patience: float, seconds: float) -> Any:
    """Open an SSH connection; returns an object of asyncssh.

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
    given = {"username": match["user"], "port": match["port"] and int(match["port"])}
    options: dict[str, Any] = {key: value for key, value in given.items() if value}
    if config is not None:
        options["config"] = [config]
    options |= {"keepalive_interval": patience / QUESTIONS, "keepalive_count_max": QUESTIONS - 1}
    try:
        async with asyncio.timeout(seconds):
            for pause in PAUSES:
                with contextlib.suppress(ConnectionResetError, asyncssh.ConnectionLost):
                    return await asyncssh.connect(match["host"].strip("[]"), **options)
                await asyncio.sleep(pause)
            return await asyncssh.connect(match["host"].strip("[]"), **options)
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


async def open_stream(connection: Any, path: str, python: str) -> tuple[Any, Any]:
    """Reader and writer of a connection to a socket on the host.

    Args:
        connection: the connection to the host.
        path: the path of the socket.
        python: an interpreter there, for hosts whose SSH servers forbid connections to sockets.
    """
    try:
        reader, writer = await connection.open_unix_connection(path, encoding=None)
    except Exception as error:
        if not isinstance(error, NotImplementedError) and type(error).__name__ != "ChannelOpenError":
            raise
        # It is no connection of SSH, or forbidden there, as some are.
        command = shlex.join((python, "-S", "-c", TO_SOCKET, path))
        process = await connection.create_process(command, encoding=None)
        return process.stdout, process.stdin
    return reader, writer


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
