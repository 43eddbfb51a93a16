"""Launcher → host: a :class:`Place`, and answers in a store; host → launcher: news, and how it ended.

A host is given its :class:`Place`, and ends with :class:`Done` or :class:`Failed`. In between it tells news, which
are lines of its standard output that start with the launch's mark; the launcher answers in the store of the rendezvous.
The news are:

``here``
    The host is ready. The answer, for all hosts, is the key ``GO``.
``world``
    A world has formed: its number, how many hosts it has, and how many workers.
``failed``
    Workers have failed, in one line. The answer is the world's verdict, ``AGAIN`` or ``END``.
``missing``
    A host of the world is gone, which may be behind such a failure.
``late``
    The functions of some ranks have not been called within ``start_timeout``.
``bad exit``
    A worker has returned, but then not ended as it should.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

__all__ = [
    "AGAIN",
    "END",
    "GO",
    "HERE",
    "STORE_SECONDS",
    "Done",
    "Failed",
    "Place",
    "WorkerFailure",
    "new_mark",
    "verdict_key",
]

STORE_SECONDS = 20.0
"""For the hosts of a world to tell each other their ranks."""
GO, HERE = "go", "here"
"""Keys of the store: that the hosts may begin, and the address by which other machines know the launcher's."""
AGAIN, END = "again", "end"
"""Verdicts on a world that has failed: its workers are started again, or the launch ends."""


def new_mark() -> str:
    """What starts a line that is not the host's own word, and no line that a program would write.

    It is followed by ``o`` or ``e``, a worker's ranks and its line, or by ``!`` and news.
    """
    return f"\x1e{secrets.token_hex(8)}"


def verdict_key(world: int) -> str:
    """Where in the store the verdict on a world is."""
    return f"verdict/{world}"


@dataclass(frozen=True)
class Place:
    """What a host is told.

    Attributes:
        name: its name.
        workers: how many it has.
        address: where the launcher's store is.
        port: likewise.
        run_id: a name of this launch that no other has.
        min_hosts: how many make a world.
        max_hosts: how many can take part.
        max_restarts: how often workers may fail.
        mark: see :func:`new_mark`.
        start_timeout: seconds for the workers to reach their function.
        exit_timeout: seconds for processes whose function has returned to end.
        stop_timeout: seconds between SIGTERM and SIGKILL.
        agent_timeout: seconds without a sign of life after which a host counts as gone.
        here: whether it is the launcher's machine.
        halted_timeout: seconds for a worker that is stopped by a signal to go on; ``None`` means as long as it takes.
    """

    name: str
    workers: int
    address: str
    port: int
    run_id: str
    min_hosts: int
    max_hosts: int
    max_restarts: int
    mark: str
    start_timeout: float
    exit_timeout: float
    stop_timeout: float
    agent_timeout: float
    halted_timeout: float | None
    here: bool


@dataclass(frozen=True)
class WorkerFailure:
    """How a worker failed.

    Attributes:
        rank: its rank in that world.
        status: its exit code, or minus a signal.
        asked: whether it was ``sys.exit``.
        told: the traceback and the pickled exception, if it raised.
        echo: whether another worker's end may be behind it.
        text: what to say of it in one line.
        halted: for how long it had been stopped by a signal, if it was ended for that.
    """

    rank: int
    status: int
    asked: bool
    told: tuple[str, bytes] | None
    echo: bool
    text: str
    halted: float = 0.0


@dataclass(frozen=True)
class Done:
    """A host's part of a world whose workers have all returned.

    Attributes:
        world: the world's number.
        place: the host's place in it.
        size: how many hosts it has.
        values: what the workers returned, packed, by local rank.
    """

    world: int
    place: int
    size: int
    values: list[bytes]


@dataclass(frozen=True)
class Failed:
    """A host's part of a world that failed once too often."""

    world: int
    failures: list[WorkerFailure]
