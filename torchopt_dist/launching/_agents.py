"""Hosts → a stream to an agent on each, which tells when it can be read or written, until all agents have ended."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from torchopt_dist.launching import _messages as messages
from torchopt_dist.launching._cluster import Host
from torchopt_dist.launching._handles import AgentHandle, WorkerHandle
from torchopt_dist.launching._pickling import pack
from torchopt_dist.launching._plan import Plan
from torchopt_dist.launching._processes import KILL_SECONDS, umask

__all__ = ["LONGEST_WAIT", "Agents"]

AGENT_SECONDS, KILLED_SECONDS = 2 + KILL_SECONDS, 1.0
"""Seconds for an agent to end, in addition to those of its workers; and after it has been killed."""
SILENT_THERE = 1.5
"""The factor of the patience with agents on other machines: the loss of a whole machine is known before that."""
LONGEST_WAIT = 86400.0
"""Seconds that one call waits, at most: the kernel's calls accept no more than 24 days."""


class Agents:
    """The agents of one attempt.

    Args:
        plan: what the launch is to do.
        hear: called with an agent when its stream can be read or written.

    Attributes:
        raised: the first exception that a step of the end has raised.
    """

    def __init__(self, plan: Plan, hear: Callable[[AgentHandle], None]) -> None:
        self._plan, self._hear = plan, hear
        self._setups = {machine: plan.setup(machine) for machine in {host.machine for host in plan.hosts}}
        self._agents: list[AgentHandle] = []
        self._selector = selectors.DefaultSelector()
        self.raised: Exception | None = None

    def __iter__(self) -> Iterator[AgentHandle]:
        return iter(self._agents)

    def connect(self, host: Host, workers: Sequence[WorkerHandle] | None = None) -> AgentHandle:
        """Connect to a new agent on a host.

        Args:
            host: the host.
            workers: those that the agent is to look after; ``None``: all of the host.

        Raises:
            OSError: the system lets no process be started, or no file be opened.
        """
        connection = host.machine.connect(self._setups[host.machine].env)
        agent = AgentHandle(host, connection, self._plan.logs, workers)
        self._agents.append(agent)
        self._selector.register(agent.stream, selectors.EVENT_READ, partial(self._hear, agent))
        agent.tell(messages.Speak(self._plan.liveness.between_signs))
        return agent

    def start(
        self, agent: AgentHandle, master: tuple[str, int], restarts: int, store: str | None = None
    ) -> None:
        """Tell an agent to start its workers.

        Args:
            agent: the agent.
            master: address and port at which the workers meet.
            restarts: how many attempts there have been before.
            store: the address at which this agent is to hold the store of the rendezvous; ``None``: it holds none.
        """
        setup, here = self._setups[agent.machine], agent.machine.here
        variables = partial(self._plan.variables, self._plan.hosts.index(agent.host))
        message = messages.StartWorkers(
            header=pack(setup),
            env={
                rank: variables(worker.local_rank, master, restarts, setup.env, worker.incarnation)
                for rank, worker in agent.workers.items()
            },
            cores=frozenset(os.sched_getaffinity(0)) if here else None,
            umask=umask() if here else None,
            store=store,
        )
        agent.tell(message, self._plan.task)

    def watch(self, end: socket.socket, act: Callable[[], object]) -> None:
        """Have :meth:`ready` return ``act`` when there is something to read from another socket, too."""
        self._selector.register(end, selectors.EVENT_READ, act)

    def unwatch(self, end: socket.socket) -> None:
        """Watch such a socket no more, if it is watched."""
        if end in self._selector.get_map():
            self._selector.unregister(end)

    def ready(self, seconds: float) -> list[Callable[[], object]]:
        """The functions to call, since something can be read or sent; waits so many seconds for that."""
        for agent in self._agents:
            if not agent.ended:
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if agent.stream.waits_to_send else 0)
                self._selector.modify(agent.stream, events, partial(self._hear, agent))
        return [key.data for key, _ in self._selector.select(min(seconds, LONGEST_WAIT))]

    def silent_at(self, agent: AgentHandle) -> float:
        """The time, by ``time.monotonic``, at which an agent is given up that gives no sign of life until then."""
        return agent.heard + self._plan.liveness.patience * (1.0 if agent.machine.here else SILENT_THERE)

    def drop(self, agent: AgentHandle) -> None:
        """Note that an agent has ended, and its workers with it."""
        agent.ended = True
        self._selector.unregister(agent.stream)
        for worker in agent.workers.values():
            worker.note_end(-signal.SIGKILL if worker.status is None else worker.status)

    def tell_to_stop(self, agent: AgentHandle, grace: float) -> None:
        """Tell an agent to end its workers and itself.

        Args:
            agent: the agent.
            grace: seconds that its workers have before they are killed.
        """
        agent.told_to_stop = True
        if agent.stream.waits_to_send:  # its task, so it has no workers; it ends with the stream
            self.drop(agent)
            agent.stream.close()
        else:
            agent.tell(messages.Stop(grace))

    def end(self, grace: float) -> list[AgentHandle]:
        """Have all agents end, and kill those that do not; returns these.

        Args:
            grace: seconds that workers have before they are killed.
        """
        for agent in self._agents:
            if not agent.ended:
                self.tell_to_stop(agent, grace)
        self._wait(grace + AGENT_SECONDS)
        late = [agent for agent in self._agents if not agent.ended]
        for agent in late:
            if agent.pid is not None:
                self.attempt(partial(agent.machine.kill, agent.pid))
        self._wait(KILLED_SECONDS)
        return late

    def attempt(self, step: Callable[[], object]) -> None:
        """Take a step of the end; an exception, such as that of a handler of ``logging``, does not stop the end."""
        try:
            step()
        except Exception as error:
            self.raised = self.raised or error

    def close(self) -> None:
        """Close all streams."""
        self._selector.close()
        for agent in self._agents:
            agent.stream.close()

    def _wait(self, seconds: float) -> None:
        """Wait for the ends of all agents, but not for one that gives no sign of life."""
        deadline = time.monotonic() + seconds
        while waiting := [agent for agent in self._agents if not agent.ended]:
            is_unread = any(agent.stream.waits_to_be_read for agent in waiting)
            until = deadline if is_unread else min(deadline, max(map(self.silent_at, waiting)))
            if (left := until - time.monotonic()) <= 0:
                return
            for act in self.ready(left):
                self.attempt(act)
