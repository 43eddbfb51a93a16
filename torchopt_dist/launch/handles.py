"""What the launcher knows of an agent, and of a worker."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from torchopt_dist.launch.cluster import Host
from torchopt_dist.launch.logs import LineSplitter
from torchopt_dist.launch.machine import Machine
from torchopt_dist.launch.pickling import unpack_value
from torchopt_dist.launch.stream import FrameReader, Stream

__all__ = ["AgentHandle", "WorkerHandle"]


@dataclass(eq=False)
class WorkerHandle:
    """What is known of one worker.

    Attributes:
        rank: its rank.
        local_rank: its rank on its host.
        host: the name of that.
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
    lines: dict[str, LineSplitter]
    report: FrameReader = field(default_factory=FrameReader)
    pid: int | None = None
    running: bool = False
    value: bytes | None = None
    failed: bool = False
    status: int | None = None
    halted: tuple[float, int] | None = None

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

    def finish_lines(self) -> None:
        """Hand on unfinished lines, too."""
        for lines in self.lines.values():
            lines.finish()


@dataclass(eq=False)
class AgentHandle:
    """What is known of one agent.

    Attributes:
        host: where it is.
        stream: to it.
        workers: those of its host, by rank.
        pid: its process, once that is known.
        heard: when it last gave a sign of life.
        answer: what it has answered to the last question.
        told_to_stop: whether it is to end.
        ended: whether it has ended, or counts as such.
    """

    host: Host
    stream: Stream
    workers: dict[int, WorkerHandle]
    pid: int | None = None
    heard: float = math.inf
    answer: Any = None
    told_to_stop: bool = False
    ended: bool = False

    @property
    def name(self) -> str:
        """The name of its host."""
        return self.host.name

    @property
    def machine(self) -> Machine:
        """The machine that its host is."""
        return self.host.machine
