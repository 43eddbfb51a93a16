"""The messages between launcher, agents and workers: dataclasses ⇄ frames on one byte stream, which never block.

A frame is the length of a pickled message, the length of its bytes, and these two. Launcher and agent have one such
stream, whatever it is made of: a Unix socket on one machine, a channel of SSH between two.
"""

from __future__ import annotations

import collections
import pickle
import select
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from torchopt_dist.launching._settings import Settings
from torchopt_dist.pickling.serialized_exception import SerializedException

__all__ = [
    "Alive",
    "Exited",
    "FrameReader",
    "Halted",
    "Header",
    "Listen",
    "Listening",
    "NotStarted",
    "Output",
    "Raised",
    "Reach",
    "Reached",
    "Returned",
    "Running",
    "Speak",
    "StartWorkers",
    "Started",
    "Stop",
    "Stream",
    "frame",
]

HEAD = struct.Struct("!IQ")
CHUNK = 1 << 18
FULL = 1 << 17
"""Bytes that wait to be sent, above which no more should be put that can wait elsewhere."""

Buffer = bytes | memoryview | pickle.PickleBuffer


# The messages, in the order in which they are sent.


@dataclass(frozen=True)
class _WithBytes:
    """A message whose last field is bytes, which are sent as they are and not copied into the pickle."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        *others, data = (getattr(self, each.name) for each in fields(self))
        return type(self), (*others, pickle.PickleBuffer(data))


@dataclass(frozen=True)
class Listen:
    """Launcher → the agent of the first host: listen, for the store at which the workers will meet."""

    port: int
    """0 means any free one."""
    everywhere: bool
    """Whether at all addresses of the machine; else at the loopback address."""


@dataclass(frozen=True)
class Listening:
    """The agent of the first host → launcher."""

    ports: dict[str, int]
    """At each address where it listens; the likeliest is the first."""
    token: bytes
    """What those who connect are given, so that they know that they have reached it."""
    error: str | None = None
    """Why it does not listen."""


@dataclass(frozen=True)
class Reach:
    """Launcher → an agent of each other machine: try which addresses can be reached."""

    where: Listening
    seconds: float


@dataclass(frozen=True)
class Reached:
    """An agent of another machine → launcher: these addresses can be reached."""

    addresses: frozenset[str]


@dataclass(frozen=True)
class Header:
    """What a worker gets from the launcher before it unpickles its task."""

    env: dict[str, str]
    path: list[str]
    """``sys.path``."""
    argv: list[str]
    """``sys.argv``."""
    folder: str
    """The working directory."""
    settings: Settings
    """The settings of the launcher's process."""
    sources: dict[str, Any] = field(default_factory=dict)
    """Code that is in no file, such as a notebook's cells: name → its entry in ``linecache``."""
    terminal: str | None = None
    """The name of the launcher's terminal, if that is on the same machine."""
    importing: frozenset[str] = frozenset()
    """The modules that were being imported when their top level launched, and those of the launches before."""


@dataclass(frozen=True)
class StartWorkers(_WithBytes):
    """Launcher → agent: fork all workers of the host."""

    header: bytes
    """The packed :class:`Header`."""
    env: dict[int, dict[str, str]]
    """By the workers' ranks, the variables that are each worker's alone."""
    cores: frozenset[int] | None
    """Those that the workers may use; ``None`` means all that the agent may use."""
    umask: int | None
    """The workers' mask for the modes of new files; ``None`` means the agent's."""
    store: str | None
    """The address, of those where the agent listens, at which the store is to be; ``None`` means at none."""
    task: bytes
    """The packed function and its arguments."""


@dataclass(frozen=True)
class NotStarted:
    """Agent → launcher: the system lets no more workers be forked, or no store be made."""

    number: int
    """The number of the system's error; 0 if it has none."""
    reason: str


@dataclass(frozen=True)
class Started:
    """Agent → launcher: a worker has been forked, and leads a session of its own."""

    rank: int
    pid: int


@dataclass(frozen=True)
class Speak:
    """Launcher → agent: how often to give a sign of life."""

    seconds: float
    """Between two of them."""


@dataclass(frozen=True)
class Alive:
    """Agent → launcher, as often as :class:`Speak` says, and every second before: it is at work."""

    pid: int


@dataclass(frozen=True)
class Output(_WithBytes):
    """Agent → launcher: a worker, or a process that it has started, has written these bytes."""

    rank: int
    into: str
    """``"stdout"``, ``"stderr"``, or ``"report"``, into which the worker writes frames of the three that follow."""
    data: bytes


@dataclass(frozen=True)
class Running:
    """Worker → launcher: the function is about to be called."""


@dataclass(frozen=True)
class Returned(_WithBytes):
    """Worker → launcher: the function has returned."""

    value: bytes
    """Packed."""


@dataclass(frozen=True)
class Raised(_WithBytes):
    """Worker → launcher: the function has raised."""

    text: SerializedException
    """The exception as text alone, which the launcher can always read."""
    exit_code: int | None
    """What the process is about to exit with if it was ``sys.exit``, else ``None``; 0 is a good end."""
    failure: bytes
    """The packed ``SerializedException``; after a good end the packed ``None``."""


@dataclass(frozen=True)
class Exited:
    """Agent → launcher: a worker's process has ended. All that it has written has been sent before."""

    rank: int
    status: int
    """Its exit code, or minus the number of the signal that ended it."""
    out_of_memory: bool = False
    """It was killed, and since it began the kernel has killed something for lack of memory."""


@dataclass(frozen=True)
class Halted:
    """Agent → launcher: a worker has been stopped by a signal, such as SIGSTOP, or goes on again."""

    rank: int
    signal: int | None
    """The signal's number; ``None`` when the worker goes on."""


@dataclass(frozen=True)
class Stop:
    """Launcher → agent: end every worker and everything that they have started, then end."""

    grace: float
    """Seconds that workers have before they are killed."""


# The stream.


def frame(message: object) -> list[memoryview]:
    """The parts of a message's frame; the last one is its bytes, if it has any."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(message, pickle.HIGHEST_PROTOCOL, buffer_callback=buffers.append)
    parts = [memoryview(each) for each in buffers if memoryview(each).nbytes]
    length = sum(part.nbytes for part in parts)
    return [memoryview(HEAD.pack(len(pickled), length) + pickled), *parts]


class FrameReader:
    """Bytes, in pieces as they arrive → messages."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """Take some bytes; returns the messages that are complete with them."""
        self._data += data
        messages = []
        while len(self._data) >= HEAD.size:
            of_pickle, of_bytes = HEAD.unpack_from(self._data)
            middle, end = HEAD.size + of_pickle, HEAD.size + of_pickle + of_bytes
            if len(self._data) < end:
                break
            with memoryview(self._data) as view:
                messages.append(pickle.loads(view[HEAD.size : middle], buffers=[bytes(view[middle:end])]))
            del self._data[:end]
        return messages


class Stream:
    """One end of a byte stream.

    Args:
        end: a connected socket of any kind that carries bytes; the stream closes it.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end
        self._reader = FrameReader()
        self._to_send: collections.deque[memoryview] = collections.deque()
        self._size = 0

    def fileno(self) -> int:
        """The descriptor to watch."""
        return self._end.fileno()

    @property
    def waits_to_send(self) -> bool:
        """Whether a message has not been sent completely yet."""
        return bool(self._to_send)

    @property
    def is_full(self) -> bool:
        """Whether so much waits to be sent that nothing more should be put that can wait elsewhere."""
        return self._size > FULL

    @property
    def waits_to_be_read(self) -> bool:
        """Whether bytes, or the end of the stream, have arrived and have not been read yet."""
        return self._ready(select.POLLIN, 0.0)

    def put(self, message: object) -> None:
        """Send a message as soon as the other end takes it.

        Raises:
            OSError: the other end is gone.
        """
        for part in frame(message):
            self._to_send.append(part)
            self._size += len(part)
        self.send()

    def send(self) -> None:
        """Send what the other end takes now.

        Raises:
            OSError: the other end is gone.
        """
        while self._to_send:
            part = self._to_send[0]
            try:
                sent = self._end.send(part[:CHUNK])
            except BlockingIOError:
                return
            self._size -= sent
            if sent == len(part):
                self._to_send.popleft()
            else:
                self._to_send[0] = part[sent:]

    def send_all(self, seconds: float) -> None:
        """Send all that waits, if the other end takes it in time.

        Raises:
            OSError: the other end is gone.
        """
        until = time.monotonic() + seconds
        while self._to_send and (left := until - time.monotonic()) > 0:
            if self._ready(select.POLLOUT, left):
                self.send()

    def receive(self) -> list[Any] | None:
        """The messages that are complete with the bytes that have arrived; ``None`` if none have arrived.

        Raises:
            EOFError: the other end is gone.
        """
        try:
            data = self._end.recv(CHUNK)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        if not data:
            raise EOFError
        return self._reader.feed(data)

    def close(self) -> None:
        """Close this end."""
        self._end.close()

    def _ready(self, event: int, seconds: float) -> bool:
        poll = select.poll()  # not `select`, which knows the first 1024 descriptors only
        poll.register(self._end, event)
        return bool(poll.poll(seconds * 1000))
