"""A packed task and places for workers → the values that all of them return, or the error that ended them.

This is the launcher's side of one attempt. Whatever happens, agents and workers are gone when :meth:`Job.run` returns
or raises.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import select
import selectors
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchopt_dist.errors import (
    AgentFailedError,
    CallTimeoutError,
    InitializationError,
    SerializationError,
    WorkerFailedError,
)
from torchopt_dist.launch.cluster import Host
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
    pair,
    receive,
    send,
    unpack,
)
from torchopt_dist.launch.plan import Orders, Plan

__all__ = ["Job"]

log = logging.getLogger(__package__)

SILENT_THERE = 1.5
AGENT_SECONDS = 5.0
"""For an agent to end, beside what workers are given."""


@dataclass(eq=False)
class _Worker:
    """What is known of one worker."""

    rank: int
    local_rank: int
    host: str
    channel: socket.socket
    output: tuple[LineReader, LineReader]
    pid: int | None = None
    running: bool = False
    result: int | None = None
    """The descriptor of the packed value that it has returned."""
    failed: bool = False
    status: int | None = None
    """Its exit code, or minus a signal, once its process has ended."""
    halted: tuple[float, int] | None = None
    """Since when it has been stopped, and by which signal."""

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}"


@dataclass(eq=False)
class _Agent:
    """What is known of one agent."""

    host: Host
    control: socket.socket
    workers: list[_Worker] = field(default_factory=list)
    pid: int | None = None
    heard: float = math.inf
    """When it last gave a sign of life."""
    ended: bool = False


class Job:
    """One attempt to run a task on all workers.

    Args:
        plan: what is to be done.
        orders: for each machine, what its workers take over.
        restarts: how many attempts there have been before.
    """

    def __init__(self, plan: Plan, orders: Mapping[Machine, Orders], restarts: int = 0) -> None:
        self._plan, self._orders, self._restarts = plan, orders, restarts
        self._logs, self._times = plan.logs, plan.times
        self._agents: list[_Agent] = []
        self._workers: list[_Worker] = []
        self._failures = Failures()
        self._started = time.monotonic()
        self._selector = selectors.DefaultSelector()

    def run(self) -> list[Any]:
        """The values of all ranks.

        Raises:
            Exception: what a worker's function raised; also a :class:`~torchopt_dist.errors.RemoteError`.
            WorkerFailedError: a worker ended before its function returned.
            AgentFailedError: an agent died.
            CallTimeoutError: the functions have not returned in time.
            InitializationError: the workers have not started in time, or the port is taken.
            SerializationError: a value cannot be read here.
        """
        meeting = Meeting([host.machine for host in self._plan.hosts], self._plan.port)
        grace = self._times.stop
        try:
            try:
                for index in range(len(self._plan.hosts)):
                    self._start_host(index, meeting)
                self._watch()
                grace = 0.0
                self._tell_bad_exits()
            finally:
                self._end(grace)
                meeting.close()
            return [_value(worker) for worker in self._workers]
        finally:
            for worker in self._workers:
                if worker.result is not None:
                    os.close(worker.result)

    def _start_host(self, index: int, meeting: Meeting) -> None:
        host = self._plan.hosts[index]
        env = self._orders[host.machine].env
        agent = _Agent(host, host.machine.request_agent(env))
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

    def _start_worker(self, agent: _Agent, local_rank: int, variables: dict[str, str]) -> None:
        rank, host = agent.host.first_rank + local_rank, agent.host.name
        channel, for_worker = pair()
        place = (rank, local_rank, host)
        output = (LineReader(self._logs, *place, "stdout"), LineReader(self._logs, *place, "stderr"))
        worker = _Worker(rank, local_rank, host, channel, output)
        agent.workers.append(worker)
        self._workers.append(worker)
        channel.setblocking(False)
        self._selector.register(channel, selectors.EVENT_READ, functools.partial(self._hear_worker, worker))
        for reader in output:
            self._selector.register(reader, selectors.EVENT_READ, functools.partial(self._read, reader))
        try:
            with for_worker, contextlib.suppress(ConnectionError):  # noticed by the agent's channel
                agent.control.settimeout(self._times.start)
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
            raise InitializationError(
                f"the agent on {host} took no orders within `start_timeout`, {self._times.start:g} s"
            ) from None
        finally:
            for reader in output:
                os.close(reader.for_worker)

    def _watch(self) -> None:
        """Return when all workers have returned and ended; raise when one will not."""
        returned_at = None
        while True:
            now = time.monotonic()
            self._failures.raise_cause(
                all(worker.failed or worker.result is not None for worker in self._workers)
            )
            if all(worker.result is not None for worker in self._workers):
                returned_at = returned_at or now
                late = [worker for worker in self._workers if worker.status is None]
                if not late or now > returned_at + self._times.exit:
                    return
            self._raise_if_late(now)
            for key, _ in self._selector.select(self._patience(now, returned_at)):
                key.data()
            self._notice_silence()

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
        ends = self._failures.times()
        if returned_at is not None:
            ends.append(returned_at + self._times.exit)
        if not all(worker.running for worker in self._workers):
            ends.append(self._started + self._times.start)
        if self._times.whole is not None:
            ends.append(self._started + self._times.whole)
        ends += [self._silent_at(agent) for agent in self._agents if agent.heard < math.inf]
        if self._times.halted is not None:
            ends += [worker.halted[0] + self._times.halted for worker in self._workers if worker.halted]
        return max(0.0, min(ends) - now) + 1e-3 if ends else None

    def _raise_if_late(self, now: float) -> None:
        waiting = [worker for worker in self._workers if not worker.running]
        if waiting and now > self._started + self._times.start:
            raise InitializationError(
                f"{', '.join(map(str, waiting))} did not start within `start_timeout`, {self._times.start:g} s"
            )
        whole = self._times.whole
        waiting = [worker for worker in self._workers if worker.result is None]
        if waiting and whole is not None and now > self._started + whole:
            raise CallTimeoutError(
                f"{', '.join(map(str, waiting))} did not return within `timeout`, {whole:g} s"
            )

    def _silent_at(self, agent: _Agent) -> float:
        """When an agent counts as lost. If nothing at all is heard of its machine, that is known before."""
        return agent.heard + self._times.agent * (1.0 if agent.host.machine.here else SILENT_THERE)

    def _notice_silence(self) -> None:
        """Of agents that have nothing to say, not even that they live, and of workers that have been stopped."""
        now = time.monotonic()
        for agent in self._agents:
            if not agent.ended and now > self._silent_at(agent):
                if _has_something(agent.control):
                    continue  # it is this process that has been slow
                if agent.pid is not None:
                    agent.host.machine.kill_agent(agent.pid)
                self._agent_ended(agent, f"gave no sign of life for {self._times.agent:g} s, and was killed")
        for worker in self._workers:
            seconds = self._times.halted
            if worker.halted is None or seconds is None or now <= worker.halted[0] + seconds:
                continue
            number = worker.halted[1]
            worker.halted = None
            if worker.result is None and not worker.failed:
                worker.failed = True
                self._failures.add(halt(worker.rank, worker.host, number, seconds, self._tail(worker)))

    def _read(self, reader: LineReader) -> None:
        if not reader.read():
            self._selector.unregister(reader)

    def _hear_agent(self, agent: _Agent) -> None:
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

    def _hear_worker(self, worker: _Worker) -> None:
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

    def _worker_raised(self, worker: _Worker, message: Raised, text: str, pickled: bytes) -> None:
        worker.failed = True
        if message.exit_code is not None:
            self._failures.add(self._death(worker, message.exit_code, asked=True), EXIT_SECONDS)
        else:
            self._failures.add(revive(text, pickled, str(worker)))

    def _worker_ended(self, worker: _Worker) -> None:
        self._hear_worker(worker)  # its last words
        if worker.result is None and not worker.failed:
            assert worker.status is not None
            worker.failed = True
            error = self._death(worker, worker.status, asked=False)
            self._failures.add(error, EXIT_SECONDS if worker.status >= 0 else 0.0)

    def _agent_ended(self, agent: _Agent, how: str) -> None:
        agent.ended, agent.heard = True, math.inf
        self._selector.unregister(agent.control)
        for worker in agent.workers:
            self._hear_worker(worker)
        left = [worker for worker in agent.workers if worker.result is None and not worker.failed]
        for worker in agent.workers:
            if agent.host.machine.here and worker.pid is not None and worker.status is None:
                kill(worker.pid)
            worker.halted = None
        error = AgentFailedError(
            f"the agent on {agent.host.name} {how}; {', '.join(map(str, left)) or 'no worker'} was ended with it"
            if any(worker.pid for worker in agent.workers)
            else f"the agent on {agent.host.name} {how}, before it started a worker; "
            "what it or its forkserver said is on standard error"
        )
        for worker in left:
            worker.failed = True
        self._failures.add(error, 0.0)

    def _death(self, worker: _Worker, status: int, asked: bool) -> WorkerFailedError:
        return death(worker.rank, worker.host, status, self._tail(worker), asked=asked)

    def _tail(self, worker: _Worker) -> tuple[str, ...]:
        for reader in worker.output:
            reader.drain()
        return self._logs.tail(worker.rank)

    def _end(self, grace: float) -> None:
        """Have everything ended, and hand on the last lines."""
        try:
            for agent in self._agents:
                if not agent.ended:
                    with contextlib.suppress(OSError):
                        agent.control.setblocking(True)
                        send(agent.control, Stop(grace))
                        agent.control.setblocking(False)
            deadline = time.monotonic() + grace + AGENT_SECONDS
            self._failures.clear()
            while not all(agent.ended for agent in self._agents):
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                for key, _ in self._selector.select(left):
                    key.data()
            for worker in self._workers:
                for reader in worker.output:
                    reader.drain()
        finally:
            self._selector.close()
            for agent in self._agents:
                agent.control.close()
            for worker in self._workers:
                worker.channel.close()
                for reader in worker.output:
                    reader.close()


def _has_something(channel: socket.socket) -> bool:
    ready = select.poll()
    ready.register(channel, select.POLLIN)
    return bool(ready.poll(0))


def _value(worker: _Worker) -> Any:
    assert worker.result is not None
    descriptor, worker.result = worker.result, None
    try:
        return unpack(descriptor)
    except Exception as error:
        raise SerializationError(
            f"what {worker} returned cannot be read by the launcher: {type(error).__name__}: {error}"
        ) from error
