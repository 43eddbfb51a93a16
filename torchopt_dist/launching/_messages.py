"""The messages between launcher, agents and workers: dataclasses, in the order in which they are sent.

``_stream.py`` carries them. Some have a payload, bytes that go with the message.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torchopt_dist.launching._settings import Settings
from torchopt_dist.pickling.serialized_exception import SerializedException

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
    "Speak",
    "StartWorkers",
    "Started",
    "Stop",
]


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
class StartWorkers:
    """Launcher → agent: fork all workers of the host. The payload is the packed function and its arguments."""

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
class Output:
    """Agent → launcher: a worker, or a process that it has started, has written the payload."""

    rank: int
    into: str
    """``"stdout"``, ``"stderr"``, or ``"report"``, into which the worker writes frames of the three that follow."""


@dataclass(frozen=True)
class Running:
    """Worker → launcher: the function is about to be called."""


@dataclass(frozen=True)
class Returned:
    """Worker → launcher: the function has returned. The payload is the packed value."""


@dataclass(frozen=True)
class Raised:
    """Worker → launcher: the function has raised. The payload is a packed ``SerializedException``."""

    told: SerializedException
    """The same as text alone, which the launcher can always read."""
    exit_code: int | None = None
    """What the process is about to exit with if it was ``sys.exit``, else ``None``; 0 is a good end."""


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
