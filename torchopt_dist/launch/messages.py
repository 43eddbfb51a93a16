"""Message, file descriptors → one datagram on a socket; object → a nameless file in memory, and back.

The launcher, the agent and the workers talk over socket pairs that they inherit or pass on. These have no address, so
no stranger can connect to them. What is large (the function, its arguments, its result) goes into a file in memory
whose descriptor travels with the message; it has no name, so nothing of it is left behind.
"""

from __future__ import annotations

import errno
import io
import mmap
import os
import pickle
import socket
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

__all__ = [
    "TOO_MANY_FILES",
    "Alive",
    "Exited",
    "ForkAgent",
    "Halted",
    "Header",
    "Held",
    "Hold",
    "KillAgent",
    "Listen",
    "Listening",
    "OpenAgent",
    "OpenMeeting",
    "Raised",
    "Reach",
    "Reached",
    "Returned",
    "Running",
    "StartWorker",
    "Started",
    "Stop",
    "pack",
    "pair",
    "receive",
    "receive_data",
    "send",
    "send_at_once",
    "unpack",
]

LARGEST = 1 << 17
"""Bytes of the largest message."""
MOST_DESCRIPTORS = 8
TOO_MANY_FILES = "too many open files: raise `ulimit -n`, or lower `nproc_per_host`"


@dataclass(frozen=True)
class ForkAgent:
    """Launcher → forkserver: fork an agent.

    With it go the agent's end of its control channel, and the end of the forkserver's own channel on which this message
    was sent, so that the workers can launch in their turn.

    Attributes:
        launcher_pid: the agent ends itself and all its workers when this process has ended.
        cores: those that this process may use, and so its workers.
        umask: its mask for the modes of new files; ``None`` if the system does not tell.
    """

    launcher_pid: int
    cores: set[int]
    umask: int | None


@dataclass(frozen=True)
class StartWorker:
    """Launcher → agent: fork a worker.

    With it go the worker's end of its channel, the pipes for its standard output and error, the header and the task.

    Attributes:
        rank: the worker's rank.
        env: the variables that are this worker's alone.
    """

    rank: int
    env: dict[str, str]


@dataclass(frozen=True)
class Header:
    """What a worker takes over from the launcher before it unpickles its task.

    Attributes:
        env: environment variables, all of them.
        path: ``sys.path``.
        argv: ``sys.argv``.
        folder: the working directory.
        sources: code that is in no file, such as a notebook's cells: name → its entry in ``linecache``.
    """

    env: dict[str, str]
    path: list[str]
    argv: list[str]
    folder: str
    sources: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Stop:
    """Launcher → agent: end every worker and everything that they have started, then end.

    Attributes:
        grace: seconds that workers have after SIGTERM, before they are killed.
    """

    grace: float


@dataclass(frozen=True)
class Started:
    """Agent → launcher: a worker has been forked, and leads a session of its own.

    Attributes:
        rank: its rank.
        pid: its process.
    """

    rank: int
    pid: int


@dataclass(frozen=True)
class Exited:
    """Agent → launcher: a worker's process has ended.

    Attributes:
        rank: its rank.
        status: its exit code, or minus the number of the signal that ended it.
    """

    rank: int
    status: int


@dataclass(frozen=True)
class Halted:
    """Agent → launcher: a worker has been stopped by a signal, such as SIGSTOP, or goes on again.

    Attributes:
        rank: its rank.
        signal: the signal's number; ``None`` when it goes on.
    """

    rank: int
    signal: int | None


@dataclass(frozen=True)
class Alive:
    """Agent → launcher, every second: it is at work.

    Attributes:
        pid: its process.
    """

    pid: int


@dataclass(frozen=True)
class Running:
    """Worker → launcher: the function is about to be called."""


@dataclass(frozen=True)
class Returned:
    """Worker → launcher: the function has returned; with it goes the packed value."""


@dataclass(frozen=True)
class Raised:
    """Worker → launcher: the function has raised; with it go, packed, the traceback and the pickled exception as data.

    Attributes:
        exit_code: what the process is about to exit with if it was ``sys.exit``, else ``None``.
    """

    exit_code: int | None = None


@dataclass(frozen=True)
class OpenAgent:
    """Launcher → relay: have an agent forked; the channel that this opens leads to it.

    Attributes:
        env: the environment that its workers will have.
    """

    env: dict[str, str]


@dataclass(frozen=True)
class KillAgent:
    """Launcher → relay: end an agent that gives no sign of life; the channel that this opens is closed at once.

    Attributes:
        pid: its process.
    """

    pid: int


@dataclass(frozen=True)
class OpenMeeting:
    """Launcher → relay: help to find a place where the workers can meet; the channel that this opens leads to that."""


@dataclass(frozen=True)
class Listen:
    """Launcher → the first host: listen on all addresses.

    Attributes:
        port: at which port; 0 means any free one.
    """

    port: int


@dataclass(frozen=True)
class Listening:
    """The first host → launcher.

    Attributes:
        addresses: where it listens; the likeliest first.
        port: at which port.
        token: what those who connect are given, so that they know that they have reached it.
        error: why it does not listen.
    """

    addresses: tuple[str, ...]
    port: int
    token: bytes
    error: str | None = None


@dataclass(frozen=True)
class Reach:
    """Launcher → each other host: try which addresses can be reached.

    Attributes:
        where: what the first host has said.
        seconds: for all of them.
    """

    where: Listening
    seconds: float


@dataclass(frozen=True)
class Reached:
    """Another host → launcher.

    Attributes:
        addresses: those that can be reached.
    """

    addresses: frozenset[str]


@dataclass(frozen=True)
class Hold:
    """Launcher → the first host: stop listening, but for this address, and hold the store there.

    Attributes:
        address: one of those at which it listens.
    """

    address: str


@dataclass(frozen=True)
class Held:
    """The first host → launcher: the store is there, until the channel is closed."""


Message = (
    ForkAgent
    | StartWorker
    | Stop
    | Started
    | Exited
    | Halted
    | Alive
    | Running
    | Returned
    | Raised
    | Listen
    | Listening
    | Reach
    | Reached
    | Hold
    | Held
)


def pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a channel that keeps messages apart and is at its end when all who hold the other end are gone."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(channel: socket.socket, message: Message, *descriptors: int) -> None:
    """Send a message, and copies of the descriptors with it.

    Raises:
        OSError: nobody holds the other end any more.
    """
    data = pickle.dumps(message)
    if descriptors:
        socket.send_fds(channel, [data], descriptors)
    else:
        channel.sendall(data)


def send_at_once(channel: socket.socket, message: Message) -> None:
    """Send a message, if that is possible without waiting.

    Raises:
        OSError: it is not.
    """
    channel.send(pickle.dumps(message), socket.MSG_DONTWAIT)


def receive(channel: socket.socket) -> tuple[Any, list[int]] | None:
    """The next message and the descriptors that came with it; ``None`` at the end.

    Raises:
        BlockingIOError: the channel does not block, and there is no message now.
        OSError: this process has too many open files to take the descriptors.
    """
    try:
        data, descriptors = receive_data(channel)
    except ConnectionError:
        return None
    return (pickle.loads(data), descriptors) if data else None


def receive_data(channel: socket.socket) -> tuple[bytes, list[int]]:
    """As :func:`receive`, but the message as it was sent; at the end it has no bytes, or raises ``ConnectionError``."""
    data, descriptors, flags, _ = socket.recv_fds(channel, LARGEST, MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    if flags & socket.MSG_CTRUNC:
        for descriptor in descriptors:
            os.close(descriptor)
        raise OSError(errno.EMFILE, TOO_MANY_FILES)
    return data, descriptors


def pack(value: object) -> int:
    """Pickle a value into a file in memory.

    Returns:
        The file's descriptor.
    """
    descriptor = os.memfd_create("todist", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(descriptor), "wb") as file:
            cloudpickle.dump(value, file)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def unpack(descriptor: int) -> Any:
    """The value that :func:`pack` has put into a file; its descriptor is closed."""
    try:
        with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as data, memoryview(data) as view:
            return _Unpickler(io.BytesIO(view)).load()
    finally:
        os.close(descriptor)


class _Unpickler(pickle.Unpickler):
    """Leaves classes that are here already as they are.

    A class of ``__main__`` travels by value. When an instance comes back, cloudpickle finds the class that it was made
    from, and would overwrite its methods and attributes with the worker's.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._here = set(getattr(cloudpickle.cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_CLASS", ()))

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if (module, name) == ("cloudpickle.cloudpickle", "_class_setstate"):
            return lambda kind, state: kind if kind in self._here else found(kind, state)
        return found
