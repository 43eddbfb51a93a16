"""A plan → the values that all workers return, or the error that ended them: the launcher's side of one attempt.

``_hosts.py`` has what is known of agents and workers. Of several errors the likeliest cause is raised. Agents and
workers have ended when :meth:`Attempt.run` returns or raises.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn, TypeVarTuple

import torch.distributed as dist

from torchopt_dist.errors import (
    AgentFailedError,
    CallTimeoutError,
    InitializationError,
    PeerFailedError,
    WorkerFailedError,
    WorkerLostError,
)
from torchopt_dist.launching._cluster import Host
from torchopt_dist.launching._hosts import (
    AgentHandle,
    AgentState,
    Plan,
    WorkerHandle,
    WorkerState,
    agree,
)
from torchopt_dist.launching._messages import ToLauncher
from torchopt_dist.launching._packing import unpack_failure
from torchopt_dist.launching._processes import KILL_SECONDS, ready
from torchopt_dist.pickling.serialized_exception import SerializedException, safe_repr

__all__ = ["Attempt", "StoppedError", "may_be_an_echo"]

log = logging.getLogger(__package__)

Told = TypeVarTuple("Told")

BROKEN = re.compile(
    "connection (was )?(closed|reset|refused|aborted)|broken pipe|socket closed", re.IGNORECASE
)
LOST_SECONDS = 0.5
"""Seconds, after an agent has ended, in which it may become known that its machine is lost."""
ECHO_SECONDS, EXIT_SECONDS = 1.0, 0.25
"""Seconds that an error waits for another one that may be its cause: a broken connection, and an exit."""
AGENT_SECONDS, KILLED_SECONDS = 2 + KILL_SECONDS, 1.0
"""Seconds for an agent to end, in addition to those of its workers; and after it has been killed."""


class StoppedError(Exception):
    """Raised by an attempt that was told to stop before all functions had returned."""


class Attempt(ToLauncher[AgentHandle, WorkerHandle]):
    """One attempt to run a task on all workers.

    Args:
        plan: the launch.
        stop: the attempt ends its workers when there is something to read from this socket.

    Attributes:
        lost: the names of the hosts that were lost → the reasons. It is complete when :meth:`run` has ended.
        replaced: the ranks that were given to new processes → the errors of the earlier processes.
    """

    def __init__(self, plan: Plan, stop: socket.socket | None = None) -> None:
        self._plan, self._options, self._stop = plan, plan.options, stop
        self._is_stopped = self._is_ending = False
        self.lost: dict[str, str] = {}
        self.replaced: defaultdict[int, list[WorkerFailedError]] = defaultdict(list)
        self._agents: list[AgentHandle] = []
        self._master = ("", 0)
        """Address and port at which the workers meet, once these are known."""
        self._workers: list[WorkerHandle] = []
        self._failures: list[tuple[float, float, Exception]] = []
        """Errors: seconds in which the cause of each may still become known, when these are over, the error."""
        self._raised: Exception | None = None
        """The first exception that a step of the end has raised."""

    def run(self) -> list[Any]:
        """The values of all ranks.

        Raises:
            Exception: as :meth:`~torchopt_dist.launching.Launcher.run`.
            StoppedError: the attempt was told to stop.
        """
        grace = self._options.stop_timeout
        try:
            for host in self._plan.hosts:
                self._workers += self._connect(host).workers.values()
            self._master = agree(self._agents, self._options.master_port, self._ask)
            for index, agent in enumerate(self._agents):
                agent.start(self._master, store=None if index else self._master[0])
            while not self._all_returned:
                self._turn()
            self._wait_for_exits()
            grace = 0.0
        finally:
            self._end(grace)
        if self._raised is not None:
            raise self._raised
        return [worker.take_value() for worker in self._workers]

    @property
    def lost_workers(self) -> dict[int, WorkerFailedError | AgentFailedError]:
        """The ranks without which the others have gone on → how they were lost."""
        return {worker.rank: worker.lost for worker in self._workers if worker.lost is not None}

    def _connect(self, host: Host, workers: Sequence[WorkerHandle] | None = None) -> AgentHandle:
        """A new agent on a host, which is to look after these workers, or after all of the host."""
        agent = AgentHandle(self._plan, host, workers)
        self._agents.append(agent)
        return agent

    # The loop.

    def _ask(
        self, agents: Sequence[AgentHandle], question: Callable[[Any, *Told], None], *args: *Told
    ) -> list[Any]:
        """The answers of agents to a question."""
        for agent in agents:
            agent.answer = None
            agent.tell(question, *args)
        while any(agent.answer is None for agent in agents):
            self._turn()
        return [agent.answer for agent in agents]

    @property
    def _all_returned(self) -> bool:
        return all(worker.is_good for worker in self._workers)

    def _turn(self, until: float = math.inf) -> None:
        """Handle the next events or the next deadline, whichever is first; return at ``until`` if neither comes."""
        until = min([until, *(moment for moment, _ in self._deadlines())])
        for act in ready(self._watched(), until - time.monotonic()):
            act()
        for moment, act in self._deadlines():
            if moment <= time.monotonic():
                act()

    def _watched(self) -> Iterator[tuple[int, bool, Callable[[], object]]]:
        """What is watched for :func:`ready`, with what is done when it can be read or sent."""
        for agent in self._agents:
            if not agent.has_ended:
                yield agent.stream.fileno(), agent.stream.waits_to_send, partial(self._hear, agent)
        if self._stop is not None and not self._is_stopped and not self._is_ending:
            yield self._stop.fileno(), False, self._note_stop

    def _deadlines(self) -> Iterator[tuple[float, Callable[[], object]]]:
        """The deadlines, by ``time.monotonic``, each with what is done when it is reached."""
        options, patience = self._options, self._plan.liveness.patience
        if self._failures:
            _, moment, error = min(self._failures, key=lambda failure: failure[0])  # of equals, the first
            all_known = all(worker.is_decided for worker in self._workers)
            yield (-math.inf if all_known else moment), partial(_raise, error)
        if self._is_stopped and not self._all_returned:
            yield -math.inf, partial(_raise, StoppedError())
        if starting := [worker.begun for worker in self._workers if worker.is_starting]:
            yield min(starting) + options.start_timeout, self._refuse_late_starts
        if options.timeout is not None and not self._all_returned:
            yield self._plan.begun + options.timeout, self._refuse_late_values
        for agent in self._agents:
            if not agent.has_ended:
                yield agent.silent_at, partial(self._give_up_agent, agent)
            for worker in agent.workers.values():
                if worker.halted is not None and not worker.is_decided:
                    since, number = worker.halted
                    yield since + patience, partial(self._give_up_halted, agent, worker, number)

    def _refuse_late_starts(self) -> None:
        waiting = ", ".join(str(worker) for worker in self._workers if worker.is_starting)
        seconds = self._options.start_timeout
        raise InitializationError(
            f"{waiting} did not start within `start_timeout`, {seconds:g} s: give more where machines are busy"
        )

    def _refuse_late_values(self) -> None:
        waiting = ", ".join(str(worker) for worker in self._workers if not worker.is_good)
        seconds = self._options.timeout
        raise CallTimeoutError(f"{waiting} did not return within `timeout`, {seconds:g} s")

    def _give_up_agent(self, agent: AgentHandle) -> None:
        """Kill an agent that gives no sign of life, unless its messages are there and were not read yet."""
        if not agent.stream.waits_to_be_read:
            agent.kill()
            seconds = self._plan.liveness.patience
            self._agent_ended(agent, f"gave no sign of life for {seconds:g} s, and was killed")

    def _give_up_halted(self, agent: AgentHandle, worker: WorkerHandle, number: int) -> None:
        """Kill a worker that is stopped, so that it cannot continue in a group that has gone on without it."""
        if not self._may_be_replaced(worker):
            self._lose(worker.halt(number, self._plan.liveness.patience), 0.0, worker)
        if self._options.on_loss != "end" and worker.pid is not None:
            worker.halted = None
            agent.machine.kill(worker.pid)

    def _lose(self, error: WorkerFailedError | AgentFailedError, wait: float, *workers: WorkerHandle) -> None:
        """Record that workers have died: the others go on without them, or this is a failure."""
        can_be_spared = workers and all(worker.rank and worker.pid for worker in workers)
        if self._options.on_loss == "end" or not can_be_spared:
            self._fail(error, wait, *workers)
            return
        log.warning("%s; the others go on", error)
        for worker in workers:
            worker.lose(error)

    def _may_be_replaced(self, worker: WorkerHandle) -> bool:
        """Whether a worker that has died gets a new process: not rank 0, and not when the attempt is about to end."""
        is_ending = self._is_ending or bool(self._failures)
        return self._options.on_loss == "replace" and worker.rank > 0 and not is_ending

    def _replace(self, agent: AgentHandle, worker: WorkerHandle, error: WorkerFailedError) -> None:
        """Give the rank of a worker that has died to a new process, started by an agent of its own."""
        most = self._options.max_replacements
        if worker.incarnation == most:
            self._fail(error, 0.0, worker)
            return
        log.warning("%s; it gets a new process, %d of %d", error, worker.incarnation + 1, most)
        worker.lose(error)
        self.replaced[worker.rank].append(error)
        if worker.incarnation:
            agent.stop(0.0)
        new = self._workers[worker.rank] = worker.successor()
        try:
            self._connect(agent.host, [new]).start(self._master)
        except (OSError, InitializationError) as reason:
            self._fail(reason, 0.0, new)

    def _fail(self, error: Exception, wait: float, *workers: WorkerHandle) -> None:
        """Record that workers have failed by an error, whose cause may become known in so many seconds."""
        for worker in workers:
            worker.enter(WorkerState.FAILED)
        self._failures.append((wait, time.monotonic() + wait, error))

    def _note_stop(self) -> None:
        self._is_stopped = True
        for agent in self._agents:
            self._hear(agent)  # its workers may have returned just now

    def _wait_for_exits(self) -> None:
        """Wait until workers that have returned have ended; log those that do not, or end with an error."""
        seconds = self._options.exit_timeout
        until = time.monotonic() + seconds
        while any(worker.status is None for worker in self._workers) and time.monotonic() < until:
            self._turn(until)
        late = f"but did not end within `exit_timeout`, {seconds:g} s"
        for worker in self._workers:
            if worker.status != 0 and worker.lost is None:
                how = late if worker.status is None else f"and then ended with status {worker.status}"
                log.warning("%s returned its value, %s", worker, how)

    # What agents and workers say.

    def _hear(self, agent: AgentHandle) -> None:
        if agent.has_ended:
            return  # since this turn began
        try:
            with contextlib.suppress(OSError):  # the end is seen as such below
                agent.stream.send()
            received = agent.stream.receive()
        except EOFError:
            working = agent.state is AgentState.WORKING
            lost = agent.machine.why_lost(LOST_SECONDS) if working else None
            self._agent_ended(agent, "died" if lost is None else f"was lost: {lost}")
            return
        if received is not None:
            agent.heard = time.monotonic()
            for name, args in received:
                getattr(self, name)(agent, *args)

    def alive(self, agent: AgentHandle, pid: int) -> None:
        """An agent is at work."""
        agent.pid = pid

    def answered(self, agent: AgentHandle, answer: Any) -> None:
        """An agent answers."""
        agent.answer = answer

    def not_started(self, agent: AgentHandle, number: int, reason: str) -> None:
        """The work is over, since an agent cannot start its workers."""
        self._fail(OSError(number, f"no more workers can be started on {agent.name}: {reason}"), 0.0)

    def started(self, agent: AgentHandle, rank: int, pid: int) -> None:
        """A worker has a process."""
        worker = agent.workers[rank]
        worker.enter(WorkerState.STARTED)
        worker.pid = pid

    def written(self, agent: AgentHandle, rank: int, into: str, data: bytes) -> None:
        """A worker has written lines, or says something itself."""
        worker = agent.workers[rank]
        if into != "report":
            worker.lines[into].feed(data)
            return
        for name, args in worker.report.feed(data):
            getattr(self, name)(worker, *args)

    def running(self, worker: WorkerHandle) -> None:
        """A worker has reached its function."""
        worker.enter(WorkerState.RUNNING)

    def returned(self, worker: WorkerHandle, value: bytes) -> None:
        """A worker's function has returned."""
        worker.give_value(value)

    def raised(
        self, worker: WorkerHandle, text: SerializedException, exit_code: int | None, failure: bytes
    ) -> None:
        """A worker's function has raised, perhaps since another worker has failed."""
        if exit_code is not None:
            self._fail(worker.death(exit_code, asked=True), EXIT_SECONDS, worker)
            return
        error = unpack_failure(text, failure, str(worker))
        self._fail(error, ECHO_SECONDS if may_be_an_echo(error) else 0.0, worker)

    def halted(self, agent: AgentHandle, rank: int, by_signal: int | None) -> None:
        """A worker is stopped from now on, or no more."""
        agent.workers[rank].halted = None if by_signal is None else (time.monotonic(), by_signal)

    def exited(self, agent: AgentHandle, rank: int, status: int, out_of_memory: bool) -> None:
        """A worker has ended: it gets a new process, the others go on without it, or this is a failure."""
        worker = agent.workers[rank]
        worker.note_end(status)
        if worker.is_decided:
            return
        error = worker.death(status, out_of_memory=out_of_memory)
        if self._may_be_replaced(worker):
            self._replace(agent, worker, error)
        else:
            self._lose(error, _wait_after(status), worker)

    def _agent_ended(self, agent: AgentHandle, how: str) -> None:
        workers = list(agent.workers.values())
        left = [worker for worker in workers if not worker.is_decided]
        was_working = agent.state is AgentState.WORKING
        agent.note_end()
        if not was_working:
            return
        self.lost[agent.name] = f"its agent {how}"
        if all(worker.is_good for worker in workers):
            log.warning("the agent on %s %s, after its workers had returned", agent.name, how)
            return
        if any(worker.pid for worker in workers):
            what = f"{how}; {', '.join(map(str, left)) or 'no worker'} was ended with it"
        else:
            what = f"{how}, before it started a worker; what it or its forkserver said is on standard error"
        self._lose(AgentFailedError(f"the agent on {agent.name} {what}"), 0.0, *left)

    # The end.

    def _end(self, grace: float) -> None:
        """End everything, and write out the last lines.

        Args:
            grace: seconds that workers have before they are killed.
        """
        self._is_ending = True
        try:
            for agent in self._agents:
                if not agent.has_ended:
                    agent.stop(grace)
            self._wait_for_ends(grace + AGENT_SECONDS)
            for agent in self._agents:
                if not agent.has_ended:
                    self.lost[agent.name] = "its agent did not end when it was told to"
                    self._attempt(agent.kill)
            self._wait_for_ends(KILLED_SECONDS)
            for worker in self._workers:
                self._attempt(worker.finish_lines)
        finally:
            for agent in self._agents:
                agent.stream.close()

    def _attempt(self, step: Callable[[], object]) -> None:
        """Take a step of the end; an exception, such as that of a handler of ``logging``, does not stop the end."""
        try:
            step()
        except Exception as error:
            self._raised = self._raised or error

    def _wait_for_ends(self, seconds: float) -> None:
        """Wait for the ends of all agents, but not for one that gives no sign of life."""
        deadline = time.monotonic() + seconds
        while waiting := [agent for agent in self._agents if not agent.has_ended]:
            is_unread = any(agent.stream.waits_to_be_read for agent in waiting)
            until = deadline if is_unread else min(deadline, max(agent.silent_at for agent in waiting))
            if (left := until - time.monotonic()) <= 0:
                return
            for act in ready(self._watched(), left):
                self._attempt(act)


def _raise(error: Exception) -> NoReturn:
    raise error


def _wait_after(status: int) -> float:
    """In how many seconds the cause of such an end may become known.

    A rank of an RPC group whose program cannot be interrupted ends itself by 1, since another one has failed; and that
    one lets it end before it says how.
    """
    return ECHO_SECONDS if status == 1 else EXIT_SECONDS if status >= 0 else 0.0


def may_be_an_echo(error: Exception) -> bool:
    """Whether the error may be a consequence of another worker's: a connection was closed."""
    if isinstance(error, (PeerFailedError, WorkerLostError, ConnectionError, dist.DistError)):
        return True
    return isinstance(error, RuntimeError) and bool(BROKEN.search(safe_repr(error, str)))
