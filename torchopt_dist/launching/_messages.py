"""What launcher, agents and workers say to each other: calls of methods ⇄ frames on a byte stream, which never block.

A message is the name of a method that the other side has, and its arguments. A frame is the length of these, pickled,
the length of the bytes that are the last argument, and these two. Launcher and agent have one such stream, whatever it
is made of: a Unix socket on one machine, a channel of SSH between two.
"""

from __future__ import annotations

import collections
import pickle
import select
import socket
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torchopt_dist.pickling.serialized_exception import SerializedException

__all__ = ["FrameReader", "Listening", "Message", "Stream", "ToAgent", "ToLauncher", "frame"]

HEAD = struct.Struct("!IQ")
CHUNK = 1 << 18
FULL = 1 << 17
"""Bytes that wait to be sent, above which no more should be put that can wait elsewhere."""

Message = tuple[str, tuple[Any, ...]]
"""The name of a method of :class:`ToAgent` or :class:`ToLauncher`, and its arguments."""
AgentT = TypeVar("AgentT")
WorkerT = TypeVar("WorkerT")


# The messages, in the order in which they are sent.


@dataclass(frozen=True)
class Listening:
    """Where the agent of the first host listens."""

    ports: dict[str, int]
    """At each address where it listens; the likeliest is the first."""
    token: bytes
    """What those who connect are given, so that they know that they have reached it."""
    error: str | None = None
    """Why it does not listen."""


class ToAgent(ABC):
    """What the launcher says to an agent."""

    @abstractmethod
    def speak(self, seconds: float) -> None:
        """Give a sign of life as often as that."""

    @abstractmethod
    def listen(self, port: int, everywhere: bool) -> None:
        """To that of the first host: listen, for the store at which the workers will meet, and answer where.

        Args:
            port: 0 means any free one.
            everywhere: whether at all addresses of the machine; else at the loopback address.
        """

    @abstractmethod
    def reach(self, where: Listening, seconds: float) -> None:
        """To one of each other machine: try, so long, which addresses can be reached, and answer the set of these."""

    @abstractmethod
    def start(
        self,
        settings: bytes,
        env: dict[int, dict[str, str]],
        cores: frozenset[int] | None,
        umask: int | None,
        store: str | None,
        task: bytes,
    ) -> None:
        """Fork all workers of the host.

        Args:
            settings: the packed :class:`~torchopt_dist.launching._settings.Settings`.
            env: by the workers' ranks, the variables that are each worker's alone.
            cores: those that the workers may use; ``None`` means all that the agent may use.
            umask: the workers' mask for the modes of new files; ``None`` means the agent's.
            store: the address, of those where the agent listens, at which the store is to be; ``None``: at none.
            task: the packed function and its arguments.
        """

    @abstractmethod
    def stop(self, grace: float) -> None:
        """End every worker and everything that they have started, then end.

        Args:
            grace: seconds that workers have before they are killed.
        """


class ToLauncher(ABC, Generic[AgentT, WorkerT]):
    """What agents and workers say to the launcher, which puts in the first argument: who says it."""

    @abstractmethod
    def alive(self, agent: AgentT, pid: int) -> None:
        """The agent is at work: as often as the launcher wants to hear it, and every second before."""

    @abstractmethod
    def answered(self, agent: AgentT, answer: Any) -> None:
        """The answer to a question, :meth:`ToAgent.listen` or :meth:`ToAgent.reach`."""

    @abstractmethod
    def not_started(self, agent: AgentT, number: int, reason: str) -> None:
        """The system lets no more workers be forked, or no store be made.

        Args:
            agent: the agent.
            number: the number of the system's error; 0 if it has none.
            reason: its text.
        """

    @abstractmethod
    def started(self, agent: AgentT, rank: int, pid: int) -> None:
        """A worker has been forked, and leads a session of its own."""

    @abstractmethod
    def written(self, agent: AgentT, rank: int, into: str, data: bytes) -> None:
        """A worker, or a process that it has started, has written these bytes.

        Args:
            agent: the agent.
            rank: the worker's.
            into: ``"stdout"``, ``"stderr"``, or ``"report"``, into which a worker writes frames of its own messages:
                :meth:`running`, and then :meth:`returned` or :meth:`raised`.
            data: the bytes.
        """

    @abstractmethod
    def running(self, worker: WorkerT) -> None:
        """The function is about to be called."""

    @abstractmethod
    def returned(self, worker: WorkerT, value: bytes) -> None:
        """The function has returned, or has called ``sys.exit(0)``, with this packed value."""

    @abstractmethod
    def raised(
        self, worker: WorkerT, text: SerializedException, exit_code: int | None, failure: bytes
    ) -> None:
        """The function has raised.

        Args:
            worker: the worker.
            text: the exception as text alone, which the launcher can always read.
            exit_code: what the process is about to exit with if it was ``sys.exit``, else ``None``.
            failure: the packed ``SerializedException``.
        """

    @abstractmethod
    def halted(self, agent: AgentT, rank: int, by_signal: int | None) -> None:
        """A worker has been stopped by a signal, such as SIGSTOP; ``None``: it goes on again."""

    @abstractmethod
    def exited(self, agent: AgentT, rank: int, status: int, out_of_memory: bool) -> None:
        """A worker's process has ended. All that it has written has been sent before.

        Args:
            agent: the agent.
            rank: the worker's.
            status: its exit code, or minus the number of the signal that ended it.
            out_of_memory: whether it was killed, and since it began the kernel has killed something for lack of
                memory.
        """


# The stream.


def frame(message: Callable[..., None], *args: Any) -> list[memoryview]:
    """The parts of a message's frame; bytes that are its last argument are the last part, and not copied."""
    if args and isinstance(args[-1], bytes):
        args = (*args[:-1], pickle.PickleBuffer(args[-1]))
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps((message.__name__, args), pickle.HIGHEST_PROTOCOL, buffer_callback=buffers.append)
    parts = [memoryview(each) for each in buffers if memoryview(each).nbytes]
    length = sum(part.nbytes for part in parts)
    return [memoryview(HEAD.pack(len(pickled), length) + pickled), *parts]


class FrameReader:
    """Bytes, in pieces as they arrive → messages."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Take some bytes; returns the messages that are complete with them."""
        self._data += data
        messages: list[Message] = []
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

    def put(self, message: Callable[..., None], *args: Any) -> None:
        """Send a message as soon as the other end takes it.

        Raises:
            OSError: the other end is gone.
        """
        for part in frame(message, *args):
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

    def receive(self) -> list[Message] | None:
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
