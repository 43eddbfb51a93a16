"""A packed task and places for workers → the values that all of them return, or the error that ended them.

This is the launcher's side of one attempt. What agents and workers say is noted in ``crew.py``; ``deadlines.py`` says
of that whose time is up, and ``failures.py`` which of several errors is the cause. Whatever happens, agents and workers
are gone when :meth:`Job.run` returns or raises.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from torchopt_dist.errors import AgentFailedError, InitializationError, WorkerFailedError
from torchopt_dist.launch.crew import Agent, Worker, open_worker
from torchopt_dist.launch.deadlines import LONGEST_WAIT, Deadlines
from torchopt_dist.launch.environment import torchrun_variables
from torchopt_dist.launch.failures import EXIT_SECONDS, Failures, death, halt, revive
from torchopt_dist.launch.logs import LineReader
from torchopt_dist.launch.machine import Machine, kill
from torchopt_dist.launch.meeting import Meeting
from torchopt_dist.launch.messages import (
    Alive,
    Exited,
    Halted,
    Raised,
    Returned,
    Running,
    Started,
    StartWorker,
    Stop,
    receive,
    send,
    unpack,
)
from torchopt_dist.launch.plan import Orders, Plan

__all__ = ["Job", "StoppedError"]

log = logging.getLogger(__package__)

AGENT_SECONDS, KILLED_SECONDS = 5.0, 1.0
"""For an agent to end, beside what workers are given; and when it has been killed."""


class StoppedError(Exception):
    """Raised by a job that was told to stop before all functions had returned."""


class Job:
    """One attempt to run a task on all workers.

    Args:
        plan: what is to be done.
        orders: for each machine, what its workers take over.
        restarts: how many attempts there have been before.
        stop: the job ends its workers when there is something to read from this socket.

    Attributes:
        lost: the names of the hosts that were lost → why. It is complete when :meth:`run` has ended.
    """

    def __init__(
        self,
        plan: Plan,
        orders: Mapping[Machine, Orders],
        restarts: int = 0,
        stop: socket.socket | None = None,
    ) -> None:
        self._plan, self._orders, self._restarts = plan, orders, restarts
        self._stop_channel, self._told_to_stop = stop, False
        self.lost: dict[str, str] = {}
        self._logs, self._times = plan.logs, plan.times
        self._agents: list[Agent] = []
        self._workers: list[Worker] = []
        self._deadlines = Deadlines(self._times, self._agents, self._workers)
        self._failures = Failures()
        self._kept: Exception | None = None
        self._selector = selectors.DefaultSelector()

    def run(self) -> list[Any]:
        """The values of all ranks.

        Raises:
            Exception: what a worker's function raised; also a :class:`~torchopt_dist.errors.RemoteError`.
            StoppedError: the job was told to stop.
            WorkerFailedError: a worker ended before its function returned.
            AgentFailedError: an agent died.
            CallTimeoutError: the functions have not returned in time.
            InitializationError: the workers have not started in time, or the port is taken.
            SerializationError: a value cannot be read here.
            OSError: this process has too many open files.
        """
        grace = self._times.stop
        try:
            with contextlib.closing(
                Meeting([host.machine for host in self._plan.hosts], self._plan.port)
            ) as meeting:
                try:
                    for index in range(len(self._plan.hosts)):
                        self._start_host(index, meeting)
                    self._watch()
                    grace = 0.0
                    self._tell_bad_exits()
                finally:
                    self._end(grace)
            if self._kept is not None:
                raise self._kept
            return [worker.take_value() for worker in self._workers]
        finally:
            for worker in self._workers:
                if worker.result is not None:
                    os.close(worker.result)

    def _start_host(self, index: int, meeting: Meeting) -> None:
        host = self._plan.hosts[index]
        env = self._orders[host.machine].env
        agent = Agent(host, host.machine.request_agent(env))
        self._agents.append(agent)
        agent.control.setblocking(False)
        self._selector.register(
            agent.control, selectors.EVENT_READ, functools.partial(self._hear_agent, agent)
        )
        for local_rank in range(host.workers):
            variables = torchrun_variables(
                hosts=self._plan.hosts,
                host=index,
                local_rank=local_rank,
                master=(meeting.address, meeting.port),
                run_id=self._plan.run_id,
                restarts=self._restarts,
                max_restarts=self._plan.max_restarts,
                env=env,
            )
            self._start_worker(agent, local_rank, variables)

    def _start_worker(self, agent: Agent, local_rank: int, variables: dict[str, str]) -> None:
        rank, host = agent.host.first_rank + local_rank, agent.host.name
        worker, for_worker = open_worker(rank, local_rank, host, self._logs)
        channel, output = worker.channel, worker.output
        agent.workers.append(worker)
        self._workers.append(worker)
        channel.setblocking(False)
        self._selector.register(channel, selectors.EVENT_READ, functools.partial(self._hear_worker, worker))
        for reader in output:
            self._selector.register(reader, selectors.EVENT_READ, functools.partial(self._read, reader))
        try:
            with for_worker, contextlib.suppress(ConnectionError):  # noticed by the agent's channel
                agent.control.settimeout(min(self._times.start, LONGEST_WAIT))
                send(
                    agent.control,
                    StartWorker(rank, variables),
                    for_worker.fileno(),
                    *(reader.for_worker for reader in output),
                    self._orders[agent.host.machine].header,
                    self._plan.task,
                )
                agent.control.setblocking(False)
        except TimeoutError:
            self.lost[host] = f"its agent took no orders for {self._times.start:g} s"
            raise InitializationError(
                f"the agent on {host} took no orders within `start_timeout`, {self._times.start:g} s"
            ) from None
        finally:
            for reader in output:
                os.close(reader.for_worker)

    def _watch(self) -> None:
        """Return when all workers have returned and ended; raise when one will not."""
        if self._stop_channel is not None:
            self._selector.register(self._stop_channel, selectors.EVENT_READ, self._note_stop)
        returned_at = None
        while True:
            now = time.monotonic()
            self._failures.raise_cause(all(worker.decided for worker in self._workers))
            if all(worker.result is not None for worker in self._workers):
                returned_at = returned_at or now
                late = [worker for worker in self._workers if worker.status is None]
                if not late or now > returned_at + self._times.exit:
                    return
            elif self._told_to_stop:
                raise StoppedError
            self._deadlines.raise_if_late(now)
            for key, _ in self._selector.select(self._patience(now, returned_at)):
                key.data()
            self._notice_silence()

    def _note_stop(self) -> None:
        assert self._stop_channel is not None
        self._selector.unregister(self._stop_channel)
        self._told_to_stop = True
        for worker in self._workers:
            self._hear_worker(worker)  # it may have returned just now

    def _tell_bad_exits(self) -> None:
        for worker in self._workers:
            if worker.status is None:
                log.warning(
                    "%s returned its value, but did not end within `exit_timeout`, %g s",
                    worker,
                    self._times.exit,
                )
            elif worker.status:
                log.warning("%s returned its value, and then ended with status %d", worker, worker.status)

    def _patience(self, now: float, returned_at: float | None) -> float | None:
        """Seconds until time alone changes something."""
        ends = self._failures.times() + self._deadlines.ahead(returned_at)
        return min(max(0.0, min(ends) - now) + 1e-3, LONGEST_WAIT) if ends else None

    def _notice_silence(self) -> None:
        """Of agents that have nothing to say, not even that they live, and of workers that have been stopped."""
        now = time.monotonic()
        for agent in self._deadlines.silent(now):
            if agent.pid is not None:
                agent.host.machine.kill_agent(agent.pid)
            self._agent_ended(agent, f"gave no sign of life for {self._times.agent:g} s, and was killed")
        for worker, number, seconds in self._deadlines.halted(now):
            worker.halted = None
            if not worker.decided:
                worker.failed = True
                self._failures.add(halt(worker.rank, worker.host, number, seconds, self._tail(worker)))

    def _read(self, reader: LineReader) -> None:
        if not reader.read():
            self._selector.unregister(reader)

    def _hear_agent(self, agent: Agent) -> None:
        try:
            received = receive(agent.control)
        except BlockingIOError:
            return
        if received is None:
            lost = agent.host.machine.why_lost()
            self._agent_ended(agent, "died" if lost is None else f"was lost: {lost}")
            return
        message, _ = received
        agent.heard = time.monotonic()
        if isinstance(message, Alive):
            agent.pid = message.pid
            return
        worker = next((worker for worker in agent.workers if worker.rank == message.rank), None)
        assert worker is not None
        if isinstance(message, Started):
            worker.pid = message.pid
        elif isinstance(message, Exited):
            worker.status, worker.halted = message.status, None
            self._worker_ended(worker)
        elif isinstance(message, Halted):
            worker.halted = None if message.signal is None else (time.monotonic(), message.signal)

    def _hear_worker(self, worker: Worker) -> None:
        while True:
            try:
                received = receive(worker.channel)
            except BlockingIOError:
                return
            if received is None:
                if worker.channel in self._selector.get_map():
                    self._selector.unregister(worker.channel)
                return
            message, descriptors = received
            worker.running = worker.running or isinstance(message, Running)
            if isinstance(message, Returned):
                worker.result = descriptors[0]
            elif isinstance(message, Raised):
                self._worker_raised(worker, message, *unpack(descriptors[0]))

    def _worker_raised(self, worker: Worker, message: Raised, text: str, pickled: bytes) -> None:
        worker.failed = True
        if message.exit_code is not None:
            self._failures.add(self._death(worker, message.exit_code, asked=True), EXIT_SECONDS)
        else:
            self._failures.add(revive(text, pickled, str(worker)))

    def _worker_ended(self, worker: Worker) -> None:
        self._hear_worker(worker)  # its last words
        if not worker.decided:
            assert worker.status is not None
            worker.failed = True
            error = self._death(worker, worker.status, asked=False)
            self._failures.add(error, EXIT_SECONDS if worker.status >= 0 else 0.0)

    def _agent_ended(self, agent: Agent, how: str) -> None:
        agent.ended, agent.heard = True, math.inf
        self._selector.unregister(agent.control)
        for worker in agent.workers:
            self._hear_worker(worker)
        left = [worker for worker in agent.workers if not worker.decided]
        for worker in agent.workers:
            if agent.host.machine.here and worker.pid is not None and worker.status is None:
                kill(worker.pid)
            worker.halted = None
            if worker.status is None:
                worker.status = -signal.SIGKILL
        if agent.told_to_stop:
            return
        self.lost[agent.host.name] = f"its agent {how}"
        if all(worker.result is not None for worker in agent.workers):
            log.warning("the agent on %s %s, after its workers had returned", agent.host.name, how)
            return
        error = AgentFailedError(
            f"the agent on {agent.host.name} {how}; {', '.join(map(str, left)) or 'no worker'} was ended with it"
            if any(worker.pid for worker in agent.workers)
            else f"the agent on {agent.host.name} {how}, before it started a worker; "
            "what it or its forkserver said is on standard error"
        )
        for worker in left:
            worker.failed = True
        self._failures.add(error, 0.0)

    def _death(self, worker: Worker, status: int, asked: bool) -> WorkerFailedError:
        return death(worker.rank, worker.host, status, self._tail(worker), asked=asked)

    def _tail(self, worker: Worker) -> tuple[str, ...]:
        worker.drain()
        return self._logs.tail(worker.rank)

    def _end(self, grace: float) -> None:
        """Have everything ended, and hand on the last lines."""
        try:
            for agent in self._agents:
                if not agent.ended:
                    self._tell_to_stop(agent, grace)
            self._failures.clear()
            self._wait_for_agents(grace + AGENT_SECONDS)
            for agent in self._agents:
                if not agent.ended:
                    self.lost[agent.host.name] = "its agent did not end when it was told to"
                    if agent.pid is not None:
                        self._attempt(functools.partial(agent.host.machine.kill_agent, agent.pid))
            self._wait_for_agents(KILLED_SECONDS)
            for worker in self._workers:
                self._attempt(worker.drain)
        finally:
            self._selector.close()
            for agent in self._agents:
                agent.control.close()
            for worker in self._workers:
                worker.close()

    def _tell_to_stop(self, agent: Agent, grace: float) -> None:
        agent.told_to_stop = True
        with contextlib.suppress(OSError):  # it has ended, or takes no orders
            agent.control.settimeout(AGENT_SECONDS)
            send(agent.control, Stop(grace))
        agent.control.setblocking(False)

    def _wait_for_agents(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not all(agent.ended for agent in self._agents):
            left = deadline - time.monotonic()
            if left <= 0:
                return
            for key, _ in self._selector.select(min(left, LONGEST_WAIT)):
                self._attempt(key.data)

    def _attempt(self, step: Callable[[], object]) -> None:
        """Take a step of the end, which goes on though a handler of ``logging`` raises, say."""
        try:
            step()
        except Exception as error:
            self._kept = self._kept or error
