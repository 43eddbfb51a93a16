"""States of workers, agents and hosts, with one table of what follows what; what the launcher knows of a worker.

Messages of agents and workers change the states. Beside them there are the errors that say how workers failed.
"""

from __future__ import annotations

import enum
import re
import time
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch.distributed as dist

from torchopt_dist.errors import AgentFailedError, PeerFailedError, WorkerFailedError, WorkerLostError
from torchopt_dist.launching._messages import FrameReader
from torchopt_dist.launching._packing import unpack_value
from torchopt_dist.launching._processes import signal_name
from torchopt_dist.launching.logs import LEVELS, LineSplitter, WorkerLogs
from torchopt_dist.pickling.serialized_exception import safe_repr

__all__ = ["FOLLOWS", "AgentState", "HostState", "Stateful", "WorkerHandle", "WorkerState", "may_be_an_echo"]

LINES_IN_MESSAGE, LONGEST_IN_MESSAGE = 10, 1000
"""The last lines of a log, and the first characters of each."""
BROKEN = re.compile(
    "connection (was )?(closed|reset|refused|aborted)|broken pipe|socket closed", re.IGNORECASE
)


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
    _W.STARTED: (
        _W.RUNNING,
        _W.RETURNED,
        _W.FAILED,
        _W.LOST,
    ),  # one that exits while it unpickles has returned
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


def may_be_an_echo(error: Exception) -> bool:
    """Whether the error may be a consequence of another worker's: a connection was closed."""
    if isinstance(error, (PeerFailedError, WorkerLostError, ConnectionError, dist.DistError)):
        return True
    return isinstance(error, RuntimeError) and bool(BROKEN.search(safe_repr(error, str)))
