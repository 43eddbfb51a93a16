"""What is known of workers and agents, how long they may take → when their time is up, and whose is."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence

from torchopt_dist.errors import CallTimeoutError, InitializationError
from torchopt_dist.launch.crew import Agent, Worker
from torchopt_dist.launch.plan import Times

__all__ = ["LONGEST_WAIT", "Deadlines"]

LONGEST_WAIT = 86400.0
"""Seconds that one call waits, at most: the kernel's calls know no more than 24 days."""

SILENT_THERE = 1.5
"""What is given to agents on other machines: if nothing at all is heard of a machine, that is known before."""


class Deadlines:
    """Those of one attempt, which begins now. All moments are by ``time.monotonic``.

    Args:
        times: how long they may take.
        agents: all that have been asked for, the later ones too.
        workers: theirs, by rank.
    """

    def __init__(self, times: Times, agents: Sequence[Agent], workers: Sequence[Worker]) -> None:
        self._times, self._agents, self._workers = times, agents, workers
        self._started = time.monotonic()

    def ahead(self, returned_at: float | None) -> list[float]:
        """When time alone changes something.

        Args:
            returned_at: when all functions had returned.
        """
        ends = []
        if returned_at is not None:
            ends.append(returned_at + self._times.exit)
        if not all(worker.running for worker in self._workers):
            ends.append(self._started + self._times.start)
        if self._times.whole is not None:
            ends.append(self._times.begun + self._times.whole)
        ends += [self._silent_at(agent) for agent in self._agents if agent.heard < math.inf]
        if self._times.halted is not None:
            ends += [worker.halted[0] + self._times.halted for worker in self._workers if worker.halted]
        return ends

    def raise_if_late(self, now: float) -> None:
        """Hold the workers to the times for their start and for their whole work.

        Raises:
            InitializationError: some have not started in time.
            CallTimeoutError: some have not returned in time.
        """
        waiting = [worker for worker in self._workers if not worker.running]
        if waiting and now > self._started + self._times.start:
            raise InitializationError(
                f"{', '.join(map(str, waiting))} did not start within `start_timeout`, {self._times.start:g} s"
            )
        whole = self._times.whole
        waiting = [worker for worker in self._workers if worker.result is None]
        if waiting and whole is not None and now > self._times.begun + whole:
            raise CallTimeoutError(
                f"{', '.join(map(str, waiting))} did not return within `timeout`, {whole:g} s"
            )

    def silent(self, now: float) -> Iterator[Agent]:
        """The agents that have nothing to say, not even that they live."""
        for agent in self._agents:
            late = not agent.ended and now > self._silent_at(agent)
            if late and not agent.waits_to_be_heard:  # else it is this process that has been slow
                yield agent

    def halted(self, now: float) -> Iterator[tuple[Worker, int, float]]:
        """The workers that have been stopped for too long, by which signal, and how many seconds are too long."""
        seconds = self._times.halted
        for worker in self._workers:
            if worker.halted is not None and seconds is not None and now > worker.halted[0] + seconds:
                yield worker, worker.halted[1], seconds

    def _silent_at(self, agent: Agent) -> float:
        """When an agent counts as lost."""
        machine = agent.host.machine
        heard = max(agent.heard, machine.held_up_at)  # what it says waits behind output that is not taken
        return heard + self._times.agent * (1.0 if machine.here else SILENT_THERE)
