"""What is known of workers and agents, how long they may take → when their time is up, and whose is."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence

from torchopt_dist.errors import CallTimeoutError, InitializationError
from torchopt_dist.launch.handles import AgentHandle, WorkerHandle
from torchopt_dist.launch.options import LaunchOptions

__all__ = ["LONGEST_WAIT", "Deadlines"]

LONGEST_WAIT = 86400.0
"""Seconds that one call waits, at most: the kernel's calls know no more than 24 days."""

SILENT_THERE = 1.5
"""What is given to agents on other machines: if nothing at all is heard of a machine, that is known before."""


class Deadlines:
    """Those of one attempt, which begins now. All moments are by ``time.monotonic``.

    Args:
        options: how long they may take.
        begun: when the launch has begun.
        agents: all that have been asked for, the later ones too.
        workers: theirs, by rank.
    """

    def __init__(
        self,
        options: LaunchOptions,
        begun: float,
        agents: Sequence[AgentHandle],
        workers: Sequence[WorkerHandle],
    ) -> None:
        self._options, self._begun, self._agents, self._workers = options, begun, agents, workers
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
