"""What launcher, agents and workers tell each other: dataclasses, in the order in which they are sent.

``stream.py`` carries them. Some have a payload, bytes that go with the message.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "Alive",
    "Exited",
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
    "StartWorkers",
    "Started",
    "Stop",
]


@dataclass(frozen=True)
class Listen:
    """Launcher → the agent of the first host: listen, for the store at which the workers will meet.

    Attributes:
        port: at which port; 0 means any free one.
        everywhere: whether at all addresses of the machine; else at the loopback address.
    """

    port: int
    everywhere: bool


@dataclass(frozen=True)
class Listening:
    """The agent of the first host → launcher.

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
    """Launcher → an agent of each other machine: try which addresses can be reached.

    Attributes:
        where: what the first host's agent has said.
        seconds: for all of them.
    """

    where: Listening
    seconds: float


@dataclass(frozen=True)
class Reached:
    """An agent of another machine → launcher.

    Attributes:
        addresses: those that can be reached.
    """

    addresses: frozenset[str]


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
class StartWorkers:
    """Launcher → agent: fork all workers of the host. The payload is the packed function and its arguments.

    Attributes:
        header: the packed :class:`Header`.
        env: by the workers' ranks, the variables that are each worker's alone.
        cores: those that the workers may use; ``None`` means all that the agent may use.
        umask: their mask for the modes of new files; ``None`` means the agent's.
        store: the address, of those where the agent listens, at which the store is to be; ``None`` means at none.
    """

    header: bytes
    env: dict[int, dict[str, str]]
    cores: frozenset[int] | None
    umask: int | None
    store: str | None


@dataclass(frozen=True)
class NotStarted:
    """Agent → launcher: the system lets no more workers be forked.

    Attributes:
        number: the number of the system's error.
        reason: its text.
    """

    number: int
    reason: str


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
class Alive:
    """Agent → launcher, every second: it is at work.

    Attributes:
        pid: its process.
    """

    pid: int


@dataclass(frozen=True)
class Output:
    """Agent → launcher: a worker, or a process that it has started, has written the payload.

    Attributes:
        rank: the worker's rank.
        into: ``"stdout"``, ``"stderr"``, or ``"report"``, in which the worker writes frames of what follows.
    """

    rank: int
    into: str


@dataclass(frozen=True)
class Running:
    """Worker → launcher, in its report: the function is about to be called."""


@dataclass(frozen=True)
class Returned:
    """Worker → launcher, in its report: the function has returned. The payload is the packed value."""


@dataclass(frozen=True)
class Raised:
    """Worker → launcher, in its report: the function has raised. The payload is a packed ``SerializedException``.

    Attributes:
        text: the traceback on the worker.
        exit_code: what the process is about to exit with if it was ``sys.exit``, else ``None``.
    """

    text: str
    exit_code: int | None = None


@dataclass(frozen=True)
class Exited:
    """Agent → launcher: a worker's process has ended. All that it has written has been sent before.

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
class Stop:
    """Launcher → agent: end every worker and everything that they have started, then end.

    Attributes:
        grace: seconds that workers have after SIGTERM, before they are killed.
    """

    grace: float
