"""A plan → the values that all workers return, or the error that ended them: the launcher's side of one attempt.

What agents and workers tell is noted in ``_handles.py``, which also says whose time is up; ``_failures.py`` says which
of several errors is the cause. Whatever happens, agents and workers are gone when :meth:`Job.run` returns or raises.
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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchopt_dist.errors import AgentFailedError, WorkerFailedError
from torchopt_dist.launch._cluster import Host, torchrun_variables
from torchopt_dist.launch._failures import EXIT_SECONDS, Failures, death, halt
from torchopt_dist.launch._handles import LONGEST_WAIT, AgentHandle, Deadlines, WorkerHandle
from torchopt_dist.launch._machine import Machine
from torchopt_dist.launch._messages import (
    Alive,
    Exited,
    Halted,
    Listening,
    NotStarted,
    Output,
    Raised,
    Reached,
    Returned,
    Running,
    Started,
    StartWorkers,
    Stop,
)
from torchopt_dist.launch._pickling import unpack_failure
from torchopt_dist.launch._plan import Plan, WorkerSetup
from torchopt_dist.launch._processes import umask
from torchopt_dist.launch._rendezvous import agree
from torchopt_dist.launch._stream import Stream
from torchopt_dist.launch.logs import LineSplitter

__all__ = ["Job", "StoppedError"]

log = logging.getLogger(__package__)

AGENT_SECONDS, KILLED_SECONDS = 5.0, 1.0
"""For an agent to end, beside what workers are given; and when it has been killed."""
LOST_SECONDS = 0.5
"""For it to become known, when an agent has ended, that its machine is lost."""


class StoppedError(Exception):
    """Raised by a job that was told to stop before all functions had returned."""


class Job:
    """One attempt to run a task on all workers.

    Args:
        plan: what is to be done.
        setups: for each machine, what its workers take over.
        restarts: how many attempts there have been before.
        stop: the job ends its workers when there is something to read from this socket.

    Attributes:
        lost: the names of the hosts that were lost → why. It is complete when :meth:`run` has ended.
    """

    def __init__(
        self,
        plan: Plan,
        setups: Mapping[Machine, WorkerSetup],
        restarts: int = 0,
        stop: socket.socket | None = None,
    ) -> None:
        self._plan, self._setups, self._restarts = plan, setups, restarts
        self._stop_channel, self._told_to_stop = stop, False
        self.lost: dict[str, str] = {}
        self._logs, self._options = plan.logs, plan.options
        self._agents: list[AgentHandle] = []
        self._workers: list[WorkerHandle] = []
        self._deadlines = Deadlines(plan, self._agents, self._workers)
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
            InitializationError: the workers have not started in time, the port is taken, or hosts do not reach each
                other.
            SerializationError: a value cannot be read here.
            OSError: there are too many open files, or processes.
        """
        grace = self._options.stop_timeout
        try:
            if self._stop_channel is not None:
                self._selector.register(self._stop_channel, selectors.EVENT_READ, self._note_stop)
            for host in self._plan.hosts:
                self._connect(host)
            master = agree(self._agents, self._options.master_port, self._ask)
            for index, agent in enumerate(self._agents):
                self._start(agent, index, master)
            self._wait_for_values()
            grace = 0.0
            self._tell_bad_exits()
        finally:
            self._end(grace)
        if self._kept is not None:
            raise self._kept
        return [worker.take_value() for worker in self._workers]

    # The start.

    def _connect(self, host: Host) -> None:
        connection = host.machine.connect(self._setups[host.machine].env)
        workers = {
            host.first_rank + local_rank: WorkerHandle(
                host.first_rank + local_rank,
                local_rank,
                host.name,
                {
                    stream: LineSplitter(
                        self._logs, host.first_rank + local_rank, local_rank, host.name, stream
                    )
                    for stream in ("stdout", "stderr")
                },
            )
            for local_rank in range(host.workers)
        }
        agent = AgentHandle(host, Stream(connection), workers)
        self._agents.append(agent)
        self._workers += workers.values()
        self._selector.register(agent.stream, selectors.EVENT_READ, functools.partial(self._hear, agent))

    def _ask(self, agents: Sequence[AgentHandle], question: object) -> list[Any]:
        """The answers of agents to a question."""
        for agent in agents:
            agent.answer = None
            self._put(agent, question)
        while any(agent.answer is None for agent in agents):
            self._turn()
        return [agent.answer for agent in agents]

    def _start(self, agent: AgentHandle, index: int, master: tuple[str, int]) -> None:
        setup = self._setups[agent.machine]
        variables = {
            rank: torchrun_variables(
                hosts=self._plan.hosts,
                host=index,
                local_rank=worker.local_rank,
                master=master,
                run_id=self._plan.run_id,
                restarts=self._restarts,
                max_restarts=self._options.max_restarts,
                env=setup.env,
            )
            for rank, worker in agent.workers.items()
        }
        here = agent.machine.here
        message = StartWorkers(
            header=setup.header,
            env=variables,
            cores=frozenset(os.sched_getaffinity(0)) if here else None,
            umask=umask() if here else None,
            store=master[0] if index == 0 else None,
        )
        self._put(agent, message, self._plan.task)

    def _put(self, agent: AgentHandle, message: object, payload: bytes = b"") -> None:
        with contextlib.suppress(OSError):  # that it has ended is noticed where it is heard
            agent.stream.put(message, payload)

    # The loop.

    def _turn(self, returned_at: float | None = None) -> None:
        """Wait for something to happen, and take note of it.

        Args:
            returned_at: when all functions had returned.

        Raises:
            Exception: as :meth:`run`.
        """
        now = time.monotonic()
        self._failures.raise_cause(all(worker.decided for worker in self._workers))
        if self._told_to_stop and returned_at is None:
            raise StoppedError
        self._deadlines.raise_if_late(now)
        for act in self._ready(self._patience(now, returned_at)):
            act()
        for late in self._deadlines.silent(time.monotonic()):
            if late.pid is not None:
                late.machine.kill_agent(late.pid)
            self._agent_ended(
                late, f"gave no sign of life for {self._options.agent_timeout:g} s, and was killed"
            )
        for worker, number, seconds in self._deadlines.halted(time.monotonic()):
            worker.halted = None
            if not worker.decided:
                worker.failed = True
                self._failures.add(halt(worker.rank, worker.host, number, seconds, self._tail(worker)))

    def _ready(self, seconds: float | None) -> list[Callable[[], None]]:
        """What is to be called, since something has come or can be sent."""
        for agent in self._agents:
            if not agent.ended:
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if agent.stream.waits_to_send else 0)
                self._selector.modify(agent.stream, events, functools.partial(self._hear, agent))
        return [key.data for key, _ in self._selector.select(seconds)]

    def _patience(self, now: float, returned_at: float | None) -> float | None:
        """Seconds until time alone changes something."""
        ends = self._failures.times() + self._deadlines.ahead(returned_at)
        return min(max(0.0, min(ends) - now) + 1e-3, LONGEST_WAIT) if ends else None

    def _note_stop(self) -> None:
        assert self._stop_channel is not None
        self._selector.unregister(self._stop_channel)
        self._told_to_stop = True
        for agent in self._agents:
            self._hear(agent)  # its workers may have returned just now

    def _wait_for_values(self) -> None:
        """Return when all workers have returned and ended; raise when one will not."""
        returned_at = None
        while True:
            if all(worker.value is not None for worker in self._workers):
                now = time.monotonic()
                returned_at = returned_at or now
                late = [worker for worker in self._workers if worker.status is None]
                if not late or now > returned_at + self._options.exit_timeout:
                    return
            self._turn(returned_at)

    def _tell_bad_exits(self) -> None:
        seconds = self._options.exit_timeout
        for worker in self._workers:
            if worker.status is None:
                log.warning(
                    "%s returned its value, but did not end within `exit_timeout`, %g s", worker, seconds
                )
            elif worker.status:
                log.warning("%s returned its value, and then ended with status %d", worker, worker.status)

    # What agents and workers tell.

    def _hear(self, agent: AgentHandle) -> None:
        if agent.ended:
            return  # since this turn began
        try:
            with contextlib.suppress(OSError):  # the end is seen as such below
                agent.stream.send()
            messages = agent.stream.receive()
        except EOFError:
            lost = None if agent.told_to_stop else agent.machine.why_lost(LOST_SECONDS)
            self._agent_ended(agent, "died" if lost is None else f"was lost: {lost}")
            return
        if messages is not None:
            agent.heard = time.monotonic()
            for message, payload in messages:
                self._note(agent, message, payload)

    def _note(self, agent: AgentHandle, message: Any, payload: bytes) -> None:
        if isinstance(message, Alive):
            agent.pid = message.pid
        elif isinstance(message, (Listening, Reached)):
            agent.answer = message
        elif isinstance(message, NotStarted):
            reason = f"no more workers can be started on {agent.name}: {message.reason}"
            self._failures.add(OSError(message.number, reason), 0.0)
        elif isinstance(message, Output):
            worker = agent.workers[message.rank]
            if message.into == "report":
                for said, of_it in worker.report.feed(payload):
                    self._note_report(worker, said, of_it)
            else:
                worker.lines[message.into].feed(payload)
        elif isinstance(message, Started):
            agent.workers[message.rank].pid = message.pid
        elif isinstance(message, Halted):
            now = time.monotonic()
            agent.workers[message.rank].halted = None if message.signal is None else (now, message.signal)
        elif isinstance(message, Exited):
            self._worker_ended(agent.workers[message.rank], message.status, message.out_of_memory)

    def _note_report(self, worker: WorkerHandle, said: Any, payload: bytes) -> None:
        if isinstance(said, Running):
            worker.running = True
        elif isinstance(said, Returned):
            worker.value = payload
        elif isinstance(said, Raised):
            worker.failed = True
            if said.exit_code is not None:
                self._failures.add(self._death(worker, said.exit_code, asked=True), EXIT_SECONDS)
            else:
                self._failures.add(unpack_failure(said.text, payload, str(worker)))

    def _worker_ended(self, worker: WorkerHandle, status: int, out_of_memory: bool) -> None:
        worker.status, worker.halted = status, None
        if not worker.decided:
            worker.failed = True
            error = self._death(worker, status, out_of_memory=out_of_memory)
            self._failures.add(error, EXIT_SECONDS if status >= 0 else 0.0)

    def _agent_ended(self, agent: AgentHandle, how: str) -> None:
        agent.ended, agent.heard = True, math.inf
        self._selector.unregister(agent.stream)
        workers = list(agent.workers.values())
        left = [worker for worker in workers if not worker.decided]
        for worker in workers:
            worker.halted = None
            if worker.status is None:
                worker.status = -signal.SIGKILL
        if agent.told_to_stop:
            return
        self.lost[agent.name] = f"its agent {how}"
        if all(worker.value is not None for worker in workers):
            log.warning("the agent on %s %s, after its workers had returned", agent.name, how)
            return
        for worker in left:
            worker.failed = True
        if any(worker.pid for worker in workers):
            what = f"{how}; {', '.join(map(str, left)) or 'no worker'} was ended with it"
        else:
            what = f"{how}, before it started a worker; what it or its forkserver said is on standard error"
        self._failures.add(AgentFailedError(f"the agent on {agent.name} {what}"), 0.0)

    def _death(
        self, worker: WorkerHandle, status: int, *, asked: bool = False, out_of_memory: bool = False
    ) -> WorkerFailedError:
        tail = self._tail(worker)
        return death(worker.rank, worker.host, status, tail, asked=asked, out_of_memory=out_of_memory)

    def _tail(self, worker: WorkerHandle) -> tuple[str, ...]:
        worker.finish_lines()
        return self._logs.tail(worker.rank)

    # The end.

    def _end(self, grace: float) -> None:
        """Have everything ended, and hand on the last lines."""
        try:
            if self._stop_channel is not None and self._stop_channel in self._selector.get_map():
                self._selector.unregister(self._stop_channel)
            for agent in self._agents:
                if not agent.ended:
                    self._tell_to_stop(agent, grace)
            self._failures.clear()
            self._wait_for_agents(grace + AGENT_SECONDS)
            for agent in self._agents:
                if not agent.ended:
                    self.lost[agent.name] = "its agent did not end when it was told to"
                    if agent.pid is not None:
                        self._attempt(functools.partial(agent.machine.kill_agent, agent.pid))
            self._wait_for_agents(KILLED_SECONDS)
            for worker in self._workers:
                self._attempt(worker.finish_lines)
        finally:
            self._selector.close()
            for agent in self._agents:
                agent.stream.close()

    def _tell_to_stop(self, agent: AgentHandle, grace: float) -> None:
        agent.told_to_stop = True
        if (
            agent.stream.waits_to_send
        ):  # it has not taken its task yet: it has no workers, and sees that nobody is here
            self._agent_ended(agent, "has no workers")
            agent.stream.close()
        else:
            self._put(agent, Stop(grace))

    def _wait_for_agents(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not all(agent.ended for agent in self._agents):
            left = deadline - time.monotonic()
            if left <= 0:
                return
            for act in self._ready(min(left, LONGEST_WAIT)):
                self._attempt(act)

    def _attempt(self, step: Callable[[], object]) -> None:
        """Take a step of the end, which goes on though a handler of ``logging`` raises, say."""
        try:
            step()
        except Exception as error:
            self._kept = self._kept or error
