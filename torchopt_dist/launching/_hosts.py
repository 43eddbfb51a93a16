"""What the launcher knows: the plan, states of workers and agents with a table of what follows what, where all meet.

Messages of agents and workers change the states. A worker's handle makes the errors that say how it failed.

On one machine workers meet at the loopback address. Between machines the agent of the first host, which has rank 0,
listens at all its addresses, an agent of each other machine tries which of them it reaches, and the first that all of
them reach is taken.
"""

from __future__ import annotations

import contextlib
import enum
import math
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar, TypeVarTuple

from torchopt_dist.errors import AgentFailedError, InitializationError, WorkerFailedError
from torchopt_dist.launching._cluster import Host
from torchopt_dist.launching._machines import Machine
from torchopt_dist.launching._messages import FrameReader, Listening, Stream, ToAgent
from torchopt_dist.launching._packing import pack, unpack_value
from torchopt_dist.launching._processes import signal_name, umask
from torchopt_dist.launching._settings import Settings, matching
from torchopt_dist.launching.logs import LEVELS, LineSplitter, WorkerLogs
from torchopt_dist.launching.options import LaunchOptions
from torchopt_dist.process.liveness import Liveness
from torchopt_dist.process.network import LOOPBACK

__all__ = [
    "FOLLOWS",
    "AgentHandle",
    "AgentState",
    "HostState",
    "Plan",
    "Stateful",
    "WorkerHandle",
    "WorkerState",
    "agree",
]

SILENT_THERE = 1.5
"""The factor of the patience with agents on other machines: the loss of a whole machine is known before that."""
REACH_SECONDS = 5.0

LINES_IN_MESSAGE, LONGEST_IN_MESSAGE = 10, 1000
"""The last lines of a log, and the first characters of each."""

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


# States.


class WorkerState(enum.Enum):
    """How far the function of a worker has come."""

    REQUESTED = "its agent has been told to start it"
    STARTED = "it has a process"
    RUNNING = "its function has been called, or is about to be"
    RETURNED = "its function has returned"
    FAILED = "there is an error that says how it failed"
    LOST = "it has died, and the others go on without it"


class AgentState(enum.Enum):
    """Whether an agent looks after its workers."""

    WORKING = "it does, or is about to"
    STOPPING = "it has been told to end them and itself"
    ENDED = "it has ended, or counts as such"


class HostState(enum.Enum):
    """Whether a host of an elastic launch takes part."""

    SPARE = "it could"
    WORKING = "it has workers in the present attempt"
    LOST = "it cannot be reached"


_W, _A, _H = WorkerState, AgentState, HostState
FOLLOWS: dict[enum.Enum, tuple[enum.Enum, ...]] = {
    _W.REQUESTED: (_W.STARTED, _W.FAILED, _W.LOST),
    # One that exits while it unpickles has returned.
    _W.STARTED: (_W.RUNNING, _W.RETURNED, _W.FAILED, _W.LOST),
    _W.RUNNING: (_W.RETURNED, _W.FAILED, _W.LOST),
    _W.RETURNED: (),
    _W.FAILED: (),
    _W.LOST: (),
    _A.WORKING: (_A.STOPPING, _A.ENDED),
    _A.STOPPING: (_A.ENDED,),
    _A.ENDED: (),
    _H.SPARE: (_H.WORKING, _H.LOST),
    _H.WORKING: (_H.SPARE, _H.LOST),
    _H.LOST: (_H.SPARE,),
}
"""State → those that may follow it."""

StateT = TypeVar("StateT", bound=enum.Enum)


class Stateful(Generic[StateT]):
    """Something with a state."""

    state: StateT

    def enter(self, state: StateT) -> bool:
        """Enter a state, if that may follow the present one; returns whether it may."""
        may = state in FOLLOWS[self.state]
        if may:
            self.state = state
        return may


# What is known of workers and agents.


@dataclass(eq=False)
class WorkerHandle(Stateful[WorkerState]):
    """What is known of one worker.

    Attributes:
        rank: its rank.
        local_rank: its rank on its host.
        host: the name of its host.
        logs: takes its lines.
        incarnation: how often the rank has been given to a new process before this one.
        begun: the time at which its start was requested.
        state: how far its function has come.
        lines: the splitters of its standard output and of its standard error.
        report: reads the frames in which it reports on its function.
        pid: its process id, once it is known.
        value: the pickled value that it has returned.
        lost: the error of a lost worker.
        status: its exit code, or minus a signal, once its process has ended.
        halted: the time since which it is stopped, and the signal that stopped it.
    """

    rank: int
    local_rank: int
    host: str
    logs: WorkerLogs
    incarnation: int = 0
    begun: float = field(default_factory=time.monotonic)
    state: WorkerState = WorkerState.REQUESTED
    lines: dict[str, LineSplitter] = field(init=False)
    report: FrameReader = field(default_factory=FrameReader)
    pid: int | None = None
    value: bytes | None = None
    lost: WorkerFailedError | AgentFailedError | None = None
    status: int | None = None
    halted: tuple[float, int] | None = None

    def __post_init__(self) -> None:
        place = (self.rank, self.local_rank, self.host)
        self.lines = {stream: LineSplitter(self.logs, *place, stream) for stream in LEVELS}

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}"

    @property
    def is_starting(self) -> bool:
        """Whether its function has not been called yet."""
        return self.state in (WorkerState.REQUESTED, WorkerState.STARTED)

    @property
    def is_decided(self) -> bool:
        """Whether the outcome of its function is known."""
        return not FOLLOWS[self.state]

    @property
    def is_good(self) -> bool:
        """Whether its function has returned, or the others go on without it."""
        return self.state in (WorkerState.RETURNED, WorkerState.LOST)

    def give_value(self, value: bytes) -> None:
        """Note the pickled value that its function has returned."""
        if self.enter(WorkerState.RETURNED):
            self.value = value

    def lose(self, error: WorkerFailedError | AgentFailedError) -> None:
        """Note the error without which the others go on."""
        if self.enter(WorkerState.LOST):
            self.lost = error

    def take_value(self) -> Any:
        """Its value, or its error if it was lost; can be called once.

        Raises:
            SerializationError: the value cannot be unpickled here.
        """
        if self.value is None:
            assert self.lost is not None
            return self.lost
        packed, self.value = self.value, None
        return unpack_value(packed, str(self))

    def successor(self) -> WorkerHandle:
        """The handle of the worker that gets the rank after this one."""
        return WorkerHandle(self.rank, self.local_rank, self.host, self.logs, self.incarnation + 1)

    def note_end(self, status: int) -> None:
        """Its process has ended."""
        self.status, self.halted = status, None

    def finish_lines(self) -> None:
        """Write out unfinished lines, too."""
        for lines in self.lines.values():
            lines.finish()

    def death(self, status: int, *, asked: bool = False, out_of_memory: bool = False) -> WorkerFailedError:
        """The error that describes its end.

        Args:
            status: its exit code, or minus the number of a signal.
            asked: whether it called ``sys.exit``.
            out_of_memory: whether the kernel has killed a process there for lack of memory.
        """
        before = "before its function returned"
        if self.incarnation:
            others = f"the {self.incarnation} processes" if self.incarnation > 1 else "the process"
            before += f", as {others} that had its rank before (`max_replacements`)"
        if status < 0:
            why = " (the kernel has killed processes there for lack of memory)" if out_of_memory else ""
            name = signal_name(-status)
            return self._failure(f"was ended by {name}{why} {before}", None, name)
        how = f"called sys.exit({status})" if asked else f"exited with code {status}"
        return self._failure(f"{how} {before}", status, None)

    def halt(self, number: int, seconds: float) -> WorkerFailedError:
        """The error that says that a signal has stopped it, and that it has not continued."""
        name = signal_name(number)
        return self._failure(f"was stopped by {name} and did not go on for {seconds:g} s", None, name)

    def _failure(self, how: str, exit_code: int | None, by_signal: str | None) -> WorkerFailedError:
        self.finish_lines()
        log = self.logs.tail(self.rank)
        text = "; the last lines of its log:" if log else "; its log is empty"
        for line in log[-LINES_IN_MESSAGE:]:
            more = len(line) - LONGEST_IN_MESSAGE
            text += f"\n    {line[:LONGEST_IN_MESSAGE]}" + (
                f" ... and {more} more characters" if more > 0 else ""
            )
        return WorkerFailedError(
            f"{self} {how}{text}",
            rank=self.rank,
            host=self.host,
            exit_code=exit_code,
            signal=by_signal,
            log=log,
        )


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
