"""What the launcher knows of the agents and workers of one attempt."""

from __future__ import annotations

import contextlib
import math
import socket
from dataclasses import dataclass, field
from typing import Any

from torchopt_dist.launch._cluster import Host
from torchopt_dist.launch._pickling import unpack_value
from torchopt_dist.launch._stream import FrameReader, Stream
from torchopt_dist.launch.logs import LEVELS, LineSplitter, WorkerLogs

__all__ = ["AgentHandle", "WorkerHandle"]


@dataclass(eq=False)
class WorkerHandle:
    """What is known of one worker.

    Attributes:
        rank: its rank.
        local_rank: its rank on its host.
        host: the name of that.
        logs: where its lines go.
        lines: of standard output, and of standard error.
        report: reads the frames in which it tells of its function.
        pid: its process, once that is known.
        running: whether its function is about to be called, or has been.
        value: what it has returned, packed.
        failed: whether there is an error that tells how it failed.
        status: its exit code, or minus a signal, once its process has ended.
        halted: since when it has been stopped, and by which signal.
    """

    rank: int
    local_rank: int
    host: str
    logs: WorkerLogs
    lines: dict[str, LineSplitter] = field(init=False)
    report: FrameReader = field(default_factory=FrameReader)
    pid: int | None = None
    running: bool = False
    value: bytes | None = None
    failed: bool = False
    status: int | None = None
    halted: tuple[float, int] | None = None

    def __post_init__(self) -> None:
        place = (self.rank, self.local_rank, self.host)
        self.lines = {stream: LineSplitter(self.logs, *place, stream) for stream in LEVELS}

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}"

    @property
    def decided(self) -> bool:
        """Whether it is known what came of its function."""
        return self.failed or self.value is not None

    def take_value(self) -> Any:
        """What it has returned; can be asked once.

        Raises:
            SerializationError: it cannot be read here.
        """
        assert self.value is not None
        packed, self.value = self.value, None
        return unpack_value(packed, str(self))

    def note_end(self, status: int) -> None:
        """Its process has ended."""
        self.status, self.halted = status, None

    def finish_lines(self) -> None:
        """Hand on unfinished lines, too."""
        for lines in self.lines.values():
            lines.finish()

    def tail(self) -> tuple[str, ...]:
        """The last lines that it has written."""
        self.finish_lines()
        return self.logs.tail(self.rank)


class AgentHandle:
    """What is known of one agent.

    Args:
        host: where it is.
        connection: to it.
        logs: where the lines of its workers go.

    Attributes:
        name: that of its host.
        machine: the machine that its host is.
        stream: to it.
        workers: those of its host, by rank.
        pid: its process, once that is known.
        heard: when it last gave a sign of life.
        answer: what it has answered to the last question.
        told_to_stop: whether it is to end.
        ended: whether it has ended, or counts as such.
    """

    def __init__(self, host: Host, connection: socket.socket, logs: WorkerLogs) -> None:
        self.name, self.machine = host.name, host.machine
        self.stream = Stream(connection)
        workers = [
            WorkerHandle(host.first_rank + local_rank, local_rank, host.name, logs)
            for local_rank in range(host.workers)
        ]
        self.workers = {worker.rank: worker for worker in workers}
        self.pid: int | None = None
        self.heard = math.inf
        self.answer: Any = None
        self.told_to_stop = self.ended = False

    def tell(self, message: object, payload: bytes = b"") -> None:
        """Send a message; that the agent has ended is noticed where it is heard."""
        with contextlib.suppress(OSError):
            self.stream.put(message, payload)
