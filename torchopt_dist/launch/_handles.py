"""What the launcher knows of agents and workers, and how long they may take → whose time is up."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchopt_dist.errors import CallTimeoutError, InitializationError
from torchopt_dist.launch._cluster import Host
from torchopt_dist.launch._machine import Machine
from torchopt_dist.launch._pickling import unpack_value
from torchopt_dist.launch._plan import Plan
from torchopt_dist.launch._stream import FrameReader, Stream
from torchopt_dist.launch.logs import LineSplitter

__all__ = ["LONGEST_WAIT", "AgentHandle", "Deadlines", "WorkerHandle"]

LONGEST_WAIT = 86400.0
"""Seconds that one call waits, at most: the kernel's calls know no more than 24 days."""

SILENT_THERE = 1.5
"""What is given to agents on other machines: if nothing at all is heard of a machine, that is known before."""


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


class Deadlines:
    """Those of one attempt, which begins now. All moments are by ``time.monotonic``.

    Args:
        plan: says how long everything may take.
        agents: all that have been asked for, the later ones too.
        workers: theirs, by rank.
    """

    def __init__(self, plan: Plan, agents: Sequence[AgentHandle], workers: Sequence[WorkerHandle]) -> None:
        self._options, self._begun = plan.options, plan.begun
        self._agents, self._workers = agents, workers
        self._started = time.monotonic()

    def ahead(self, returned_at: float | None) -> list[float]:
        """When time alone changes something.

        Args:
            returned_at: when all functions had returned.
        """
        ends = []
        if returned_at is not None:
            ends.append(returned_at + self._options.exit_timeout)
        if not all(worker.running for worker in self._workers):
            ends.append(self._started + self._options.start_timeout)
        if self._options.timeout is not None:
            ends.append(self._begun + self._options.timeout)
        ends += [self._silent_at(agent) for agent in self._agents if agent.heard < math.inf]
        if self._options.halted_timeout is not None:
            ends += [
                worker.halted[0] + self._options.halted_timeout for worker in self._workers if worker.halted
            ]
        return ends

    def raise_if_late(self, now: float) -> None:
        """Refuse to wait any longer for workers to start, or to return.

        Raises:
            InitializationError: some have not started in time.
            CallTimeoutError: some have not returned in time.
        """
        waiting = [worker for worker in self._workers if not worker.running]
        if waiting and now > self._started + self._options.start_timeout:
            seconds = self._options.start_timeout
            raise InitializationError(
                f"{', '.join(map(str, waiting))} did not start within `start_timeout`, {seconds:g} s"
            )
        whole = self._options.timeout
        waiting = [worker for worker in self._workers if worker.value is None]
        if waiting and whole is not None and now > self._begun + whole:
            raise CallTimeoutError(
                f"{', '.join(map(str, waiting))} did not return within `timeout`, {whole:g} s"
            )

    def silent(self, now: float) -> Iterator[AgentHandle]:
        """The agents that have nothing to say, not even that they live."""
        for agent in self._agents:
            late = not agent.ended and now > self._silent_at(agent)
            if late and not agent.stream.waits_to_be_read:  # else it is this process that has been slow
                yield agent

    def halted(self, now: float) -> Iterator[tuple[WorkerHandle, int, float]]:
        """The workers that have been stopped for too long, by which signal, and how many seconds are too long."""
        seconds = self._options.halted_timeout
        for worker in self._workers:
            if worker.halted is not None and seconds is not None and now > worker.halted[0] + seconds:
                yield worker, worker.halted[1], seconds

    def _silent_at(self, agent: AgentHandle) -> float:
        """When an agent counts as lost."""
        return agent.heard + self._options.agent_timeout * (1.0 if agent.machine.here else SILENT_THERE)
