"""A plan with its hosts → a stream to an agent on each, the address at which all workers meet, and the agents' ends.

On one machine workers meet at the loopback address. Between machines the agent of the first host, which has rank 0,
listens at all its addresses, an agent of each other machine tries which of them it reaches, and the first that all of
them reach is taken.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torchopt_dist.errors import InitializationError
from torchopt_dist.launching._cluster import Host
from torchopt_dist.launching._machines import Machine
from torchopt_dist.launching._messages import Listening, ToAgent
from torchopt_dist.launching._packing import pack
from torchopt_dist.launching._processes import KILL_SECONDS, umask
from torchopt_dist.launching._settings import Settings, matching
from torchopt_dist.launching._states import AgentHandle, AgentState, WorkerHandle
from torchopt_dist.launching._store import LOOPBACK
from torchopt_dist.launching.logs import WorkerLogs
from torchopt_dist.launching.options import LaunchOptions
from torchopt_dist.process.liveness import Liveness

__all__ = ["LONGEST_WAIT", "Agents", "Plan", "agree"]

AGENT_SECONDS, KILLED_SECONDS = 2 + KILL_SECONDS, 1.0
"""Seconds for an agent to end, in addition to those of its workers; and after it has been killed."""
SILENT_THERE = 1.5
"""The factor of the patience with agents on other machines: the loss of a whole machine is known before that."""
LONGEST_WAIT = 86400.0
"""Seconds that one call waits, at most: the kernel's calls accept no more than 24 days."""
REACH_SECONDS = 5.0


@dataclass(frozen=True)
class Plan:
    """A launch.

    Attributes:
        options: the launcher's options.
        begun: the time at which the launch began, by ``time.monotonic``.
        liveness: after how long a host or a worker that has not ended counts as lost.
        hosts: the hosts, with the number of workers on each.
        settings: those of this process.
        added: the variables that all workers get beside those of this process or of their machine.
        task: the packed function and its arguments.
        logs: takes the workers' output.
        run_id: a unique name of this launch.
    """

    options: LaunchOptions
    begun: float
    liveness: Liveness
    hosts: list[Host]
    settings: Settings
    added: Mapping[str, str]
    task: bytes
    logs: WorkerLogs
    run_id: str

    def settings_on(self, machine: Machine) -> Settings:
        """What workers on a machine get from this process."""
        settings = self.settings
        if not machine.here:
            ours = [os.path.abspath(entry) for entry in settings.path]  # that of the script is the first
            settings = replace(
                settings,
                env={**machine.env, **matching(self.options.copy_env, settings.env)},
                path=list(dict.fromkeys([*ours[:1], *machine.path, *ours])),
                terminal=None,
            )
        env = {**settings.env, **self.added}
        env.pop("TODIST_INCARNATION", None)  # of a worker that launches itself
        return replace(settings, env=env)


class Agents:
    """The agents of one attempt.

    Args:
        plan: what the launch is to do.
        restarts: how many attempts there have been before.
        hear: called with an agent when its stream can be read or written.

    Attributes:
        master: address and port at which the workers meet, once these are known.
        raised: the first exception that a step of the end has raised.
    """

    def __init__(self, plan: Plan, restarts: int, hear: Callable[[AgentHandle], None]) -> None:
        self._plan, self._restarts, self._hear = plan, restarts, hear
        self.master = ("", 0)
        self._settings = {
            machine: plan.settings_on(machine) for machine in {host.machine for host in plan.hosts}
        }
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
        connection = host.machine.connect(self._settings[host.machine].env)
        agent = AgentHandle(host, connection, self._plan.logs, workers)
        self._agents.append(agent)
        self._selector.register(agent.stream, selectors.EVENT_READ, partial(self._hear, agent))
        agent.tell(ToAgent.speak, self._plan.liveness.between_signs)
        return agent

    def start(self, agent: AgentHandle, store: str | None = None) -> None:
        """Tell an agent to start its workers.

        Args:
            agent: the agent.
            store: the address at which this agent is to hold the store of the rendezvous; ``None``: it holds none.
        """
        here = agent.machine.here
        settings = pack(self._settings[agent.machine])
        env = {rank: self._variables(agent.host, worker) for rank, worker in agent.workers.items()}
        cores = frozenset(os.sched_getaffinity(0)) if here else None
        mask = umask() if here else None
        agent.tell(ToAgent.start, settings, env, cores, mask, store, self._plan.task)

    def _variables(self, host: Host, worker: WorkerHandle) -> dict[str, str]:
        """The variables that torchrun would set for a worker."""
        hosts, env, options = self._plan.hosts, self._settings[host.machine].env, self._plan.options
        world_size = sum(each.workers for each in hosts)
        variables = {
            "RANK": worker.rank,
            "LOCAL_RANK": worker.local_rank,
            "WORLD_SIZE": world_size,
            "LOCAL_WORLD_SIZE": host.workers,
            "GROUP_RANK": hosts.index(host),
            "GROUP_WORLD_SIZE": len(hosts),
            "ROLE_NAME": "default",
            "ROLE_RANK": worker.rank,
            "ROLE_WORLD_SIZE": world_size,
            "MASTER_ADDR": self.master[0],
            "MASTER_PORT": self.master[1],
            "TORCHELASTIC_RUN_ID": self._plan.run_id,
            "TORCHELASTIC_RESTART_COUNT": self._restarts,
            "TORCHELASTIC_MAX_RESTARTS": options.max_restarts,
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": env.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", 1),
        }
        if options.on_loss == "replace":
            variables["TODIST_INCARNATION"] = worker.incarnation
        if host.workers > 1 and "OMP_NUM_THREADS" not in env:
            variables["OMP_NUM_THREADS"] = 1
        return {name: str(value) for name, value in variables.items()}

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
            if not agent.has_ended:
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if agent.stream.waits_to_send else 0)
                self._selector.modify(agent.stream, events, partial(self._hear, agent))
        return [key.data for key, _ in self._selector.select(min(seconds, LONGEST_WAIT))]

    def silent_at(self, agent: AgentHandle) -> float:
        """The time, by ``time.monotonic``, at which an agent is given up that gives no sign of life until then."""
        return agent.heard + self._plan.liveness.patience * (1.0 if agent.machine.here else SILENT_THERE)

    def drop(self, agent: AgentHandle) -> None:
        """Note that an agent has ended, and its workers with it."""
        agent.enter(AgentState.ENDED)
        self._selector.unregister(agent.stream)
        for worker in agent.workers.values():
            worker.note_end(-signal.SIGKILL if worker.status is None else worker.status)

    def tell_to_stop(self, agent: AgentHandle, grace: float) -> None:
        """Tell an agent to end its workers and itself.

        Args:
            agent: the agent.
            grace: seconds that its workers have before they are killed.
        """
        agent.enter(AgentState.STOPPING)
        if agent.stream.waits_to_send:  # its task, so it has no workers; it ends with the stream
            self.drop(agent)
            agent.stream.close()
        else:
            agent.tell(ToAgent.stop, grace)

    def end(self, grace: float) -> list[AgentHandle]:
        """Have all agents end, and kill those that do not; returns these.

        Args:
            grace: seconds that workers have before they are killed.
        """
        for agent in self._agents:
            if not agent.has_ended:
                self.tell_to_stop(agent, grace)
        self._wait(grace + AGENT_SECONDS)
        late = [agent for agent in self._agents if not agent.has_ended]
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
        while waiting := [agent for agent in self._agents if not agent.has_ended]:
            is_unread = any(agent.stream.waits_to_be_read for agent in waiting)
            until = deadline if is_unread else min(deadline, max(map(self.silent_at, waiting)))
            if (left := until - time.monotonic()) <= 0:
                return
            for act in self.ready(left):
                self.attempt(act)


# Where workers meet.

Ask = Callable[..., list[Any]]
"""Agents, a question and its arguments → the answer of each; a lost agent or one that takes too long is an error."""


def agree(agents: Sequence[AgentHandle], port: int, ask: Ask) -> tuple[str, int]:
    """The address and the port at which workers meet: the agent of the first host listens there from now on.

    Args:
        agents: those of all hosts, the first host's first.
        port: the port; 0 means any free one.
        ask: a function from agents and a question to their answers.

    Raises:
        InitializationError: the port is taken, or not all hosts can reach the first one.
    """
    first = agents[0]
    others = {agent.machine: agent for agent in agents if agent.machine is not first.machine}
    (where,) = ask([first], ToAgent.listen, port, bool(others))
    if where.error is not None:
        raise InitializationError(where.error + ("" if first.machine.here else f" on {first.name}"))
    if not others:
        return next(iter(where.ports.items()))
    known = [other.launcher_address for other in others] if first.machine.here else [first.machine.address]
    likely = {address: where.ports[address] for address in known if address in where.ports}
    ports = {address: port for address, port in where.ports.items() if address != LOOPBACK}
    where = replace(where, ports=likely | ports)
    reached = ask(list(others.values()), ToAgent.reach, where, REACH_SECONDS)
    for address, port in where.ports.items():
        if all(address in addresses for addresses in reached):
            return address, port
    raise InitializationError(_why_apart(first.name, list(others.values()), reached, where))


def _why_apart(first: str, others: list[AgentHandle], reached: list[frozenset[str]], where: Listening) -> str:
    lost = [other.name for other, addresses in zip(others, reached, strict=True) if not addresses]
    if not lost:
        names = ", ".join(other.name for other in others)
        return f"{names} reach no address of {first}, where rank 0 is, that all of them reach"
    return (
        f"{', '.join(lost)} cannot reach {first}, where rank 0 is, at any of its addresses "
        f"{', '.join(f'{address} port {port}' for address, port in where.ports.items())}: "
        "is there a firewall? `master_port` chooses the port"
    )
