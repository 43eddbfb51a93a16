"""A plan with its hosts → an agent on each, with the stream to it; and the address at which all workers meet.

On one machine workers meet at the loopback address. Between machines the agent of the first host, which has rank 0,
listens at all its addresses, an agent of each other machine tries which of them it reaches, and the first that all of
them reach is taken.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVarTuple

from torchopt_dist.errors import InitializationError
from torchopt_dist.launching._cluster import Host
from torchopt_dist.launching._machines import Machine
from torchopt_dist.launching._messages import Listening, Stream, ToAgent
from torchopt_dist.launching._packing import pack
from torchopt_dist.launching._processes import umask
from torchopt_dist.launching._settings import Settings, matching
from torchopt_dist.launching._states import AgentState, Stateful, WorkerHandle
from torchopt_dist.launching._store import LOOPBACK
from torchopt_dist.launching.logs import WorkerLogs
from torchopt_dist.launching.options import LaunchOptions
from torchopt_dist.process.liveness import Liveness

__all__ = ["LONGEST_WAIT", "AgentHandle", "Plan", "agree"]

SILENT_THERE = 1.5
"""The factor of the patience with agents on other machines: the loss of a whole machine is known before that."""
LONGEST_WAIT = 86400.0
"""Seconds that one call waits, at most: the kernel's calls accept no more than 24 days."""
REACH_SECONDS = 5.0

Told = TypeVarTuple("Told")


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
        restarts: how many attempts there have been before the present one.
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
    restarts: int = 0

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


class AgentHandle(Stateful[AgentState]):
    """What is known of an agent, and the stream to it.

    Args:
        plan: the launch.
        host: where a new agent is to be.
        workers: those that it is to look after; ``None``: all of the host.

    Raises:
        OSError: the system lets no process be started, or no file be opened.

    Attributes:
        host: where it is.
        name: the name of its host.
        machine: the machine of its host.
        stream: the stream to it.
        workers: those that it looks after, by rank.
        state: whether it looks after them.
        pid: its process id, once it is known.
        heard: the time of its last sign of life.
        answer: its answer to the last question.
    """

    def __init__(self, plan: Plan, host: Host, workers: Sequence[WorkerHandle] | None = None) -> None:
        self._plan, self._settings = plan, plan.settings_on(host.machine)
        self.host, self.name, self.machine = host, host.name, host.machine
        self.stream = Stream(host.machine.connect(self._settings.env))
        if workers is None:
            workers = [
                WorkerHandle(host.first_rank + local_rank, local_rank, host.name, plan.logs)
                for local_rank in range(host.workers)
            ]
        self.workers = {worker.rank: worker for worker in workers}
        self.state = AgentState.WORKING
        self.pid: int | None = None
        self.heard = math.inf
        self.answer: Any = None
        self.tell(ToAgent.speak, plan.liveness.between_signs)

    @property
    def has_ended(self) -> bool:
        """Whether it has ended, or counts as such."""
        return self.state is AgentState.ENDED

    @property
    def silent_at(self) -> float:
        """The time, by ``time.monotonic``, at which it is given up if it gives no sign of life until then."""
        return self.heard + self._plan.liveness.patience * (1.0 if self.machine.here else SILENT_THERE)

    def tell(self, message: Callable[[Any, *Told], None], *args: *Told) -> None:
        """Send a message of :class:`ToAgent`. If the agent has ended, this is noticed when the stream is read."""
        with contextlib.suppress(OSError):
            self.stream.put(message, *args)

    def start(self, master: tuple[str, int], store: str | None = None) -> None:
        """Tell it to start its workers.

        Args:
            master: the address and the port at which the workers meet.
            store: the address at which this agent is to hold the store of the rendezvous; ``None``: it holds none.
        """
        env = {rank: self._variables(worker, master) for rank, worker in self.workers.items()}
        cores = frozenset(os.sched_getaffinity(0)) if self.machine.here else None
        mask = umask() if self.machine.here else None
        self.tell(ToAgent.start, pack(self._settings), env, cores, mask, store, self._plan.task)

    def _variables(self, worker: WorkerHandle, master: tuple[str, int]) -> dict[str, str]:
        """The variables that torchrun would set for a worker."""
        hosts, env, options = self._plan.hosts, self._settings.env, self._plan.options
        world_size = sum(each.workers for each in hosts)
        variables = {
            "RANK": worker.rank,
            "LOCAL_RANK": worker.local_rank,
            "WORLD_SIZE": world_size,
            "LOCAL_WORLD_SIZE": self.host.workers,
            "GROUP_RANK": hosts.index(self.host),
            "GROUP_WORLD_SIZE": len(hosts),
            "ROLE_NAME": "default",
            "ROLE_RANK": worker.rank,
            "ROLE_WORLD_SIZE": world_size,
            "MASTER_ADDR": master[0],
            "MASTER_PORT": master[1],
            "TORCHELASTIC_RUN_ID": self._plan.run_id,
            "TORCHELASTIC_RESTART_COUNT": self._plan.restarts,
            "TORCHELASTIC_MAX_RESTARTS": options.max_restarts,
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": env.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", 1),
        }
        if options.on_loss == "replace":
            variables["TODIST_INCARNATION"] = worker.incarnation
        if self.host.workers > 1 and "OMP_NUM_THREADS" not in env:
            variables["OMP_NUM_THREADS"] = 1
        return {name: str(value) for name, value in variables.items()}

    def stop(self, grace: float) -> None:
        """Tell it to end its workers and itself.

        Args:
            grace: seconds that its workers have before they are killed.
        """
        self.enter(AgentState.STOPPING)
        if self.stream.waits_to_send:  # its task, so it has no workers; it ends with the stream
            self.note_end()
            self.stream.close()
        else:
            self.tell(ToAgent.stop, grace)

    def kill(self) -> None:
        """Kill it, if its process is known."""
        if self.pid is not None:
            self.machine.kill(self.pid)

    def note_end(self) -> None:
        """It has ended, and its workers with it."""
        self.enter(AgentState.ENDED)
        for worker in self.workers.values():
            worker.note_end(-signal.SIGKILL if worker.status is None else worker.status)


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
