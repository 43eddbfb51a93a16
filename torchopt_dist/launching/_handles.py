"""Messages of agents and workers → what the launcher knows of each, and the errors that say how workers failed."""

from __future__ import annotations

import contextlib
import math
import re
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from torchopt_dist.errors import AgentFailedError, PeerFailedError, WorkerFailedError, WorkerLostError
from torchopt_dist.launching._cluster import Host
from torchopt_dist.launching._pickling import unpack_value
from torchopt_dist.launching._stream import FrameReader, Stream
from torchopt_dist.launching.logs import LEVELS, LineSplitter, WorkerLogs
from torchopt_dist.pickling.serialized_exception import safe_repr

__all__ = ["AgentHandle", "WorkerHandle", "may_be_an_echo"]

LINES_IN_MESSAGE, LONGEST_IN_MESSAGE = 10, 1000
"""The last lines of a log, and the first characters of each."""
BROKEN = re.compile(
    "connection (was )?(closed|reset|refused|aborted)|broken pipe|socket closed", re.IGNORECASE
)


@dataclass(eq=False)
class WorkerHandle:
    """What is known of one worker.

    Attributes:
        rank: its rank.
        local_rank: its rank on its host.
        host: the name of its host.
        incarnation: how often the rank has been given to a new process before this one.
        begun: the time at which its start was requested.
        logs: takes its lines.
        lines: the splitters of its standard output and of its standard error.
        report: reads the frames in which it reports on its function.
        pid: its process id, once it is known.
        running: whether its function has been called, or is about to be.
        value: the pickled value that it has returned.
        failed: whether there is an error that says how it failed.
        lost: that error, where the others go on without it.
        status: its exit code, or minus a signal, once its process has ended.
        halted: the time since which it is stopped, and the signal that stopped it.
    """

    rank: int
    local_rank: int
    host: str
    logs: WorkerLogs
    incarnation: int = 0
    begun: float = field(default_factory=time.monotonic)
    lines: dict[str, LineSplitter] = field(init=False)
    report: FrameReader = field(default_factory=FrameReader)
    pid: int | None = None
    running: bool = False
    value: bytes | None = None
    failed: bool = False
    lost: WorkerFailedError | AgentFailedError | None = None
    status: int | None = None
    halted: tuple[float, int] | None = None

    def __post_init__(self) -> None:
        place = (self.rank, self.local_rank, self.host)
        self.lines = {stream: LineSplitter(self.logs, *place, stream) for stream in LEVELS}

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}"

    @property
    def decided(self) -> bool:
        """Whether the outcome of its function is known."""
        return self.failed or self.has_ended_well

    @property
    def has_ended_well(self) -> bool:
        """Whether its function has returned, or the others go on without it."""
        return self.value is not None or self.lost is not None

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
            name = _signal_name(-status)
            return self._failure(f"was ended by {name}{why} {before}", None, name)
        how = f"called sys.exit({status})" if asked else f"exited with code {status}"
        return self._failure(f"{how} {before}", status, None)

    def halt(self, number: int, seconds: float) -> WorkerFailedError:
        """The error that says that a signal has stopped it, and that it has not continued."""
        name = _signal_name(number)
        return self._failure(f"was stopped by {name} and did not go on for {seconds:g} s", None, name)

    def _failure(self, how: str, exit_code: int | None, by_signal: str | None) -> WorkerFailedError:
        self.finish_lines()
        log = self.logs.tail(self.rank)
        said = "; the last lines of its log:" if log else "; its log is empty"
        for line in log[-LINES_IN_MESSAGE:]:
            more = len(line) - LONGEST_IN_MESSAGE
            said += f"\n    {line[:LONGEST_IN_MESSAGE]}" + (
                f" ... and {more} more characters" if more > 0 else ""
            )
        return WorkerFailedError(
            f"{self} {how}{said}",
            rank=self.rank,
            host=self.host,
            exit_code=exit_code,
            signal=by_signal,
            log=log,
        )


class AgentHandle:
    """What the launcher knows of an agent.

    Args:
        host: where it is.
        connection: the socket to it.
        logs: takes the lines of its workers.
        workers: the workers that it is to start; ``None``: all of the host.

    Attributes:
        host: where it is.
        name: the name of its host.
        machine: the machine of its host.
        stream: the stream to it.
        workers: those of its host, by rank.
        pid: its process id, once it is known.
        heard: the time of its last sign of life.
        answer: its answer to the last question.
        told_to_stop: whether it has been told to end.
        ended: whether it has ended, or counts as such.
    """

    def __init__(
        self,
        host: Host,
        connection: socket.socket,
        logs: WorkerLogs,
        workers: Sequence[WorkerHandle] | None = None,
    ) -> None:
        self.host, self.name, self.machine = host, host.name, host.machine
        self.stream = Stream(connection)
        if workers is None:
            workers = [
                WorkerHandle(host.first_rank + local_rank, local_rank, host.name, logs)
                for local_rank in range(host.workers)
            ]
        self.workers = {worker.rank: worker for worker in workers}
        self.pid: int | None = None
        self.heard = math.inf
        self.answer: Any = None
        self.told_to_stop = self.ended = False

    def tell(self, message: object, payload: bytes = b"") -> None:
        """Send a message. If the agent has ended, this is noticed when the stream is read."""
        with contextlib.suppress(OSError):
            self.stream.put(message, payload)


def may_be_an_echo(error: Exception) -> bool:
    """Whether the error may be a consequence of another worker's: a connection was closed."""
    if isinstance(error, (PeerFailedError, WorkerLostError, ConnectionError, dist.DistError)):
        return True
    return isinstance(error, RuntimeError) and bool(BROKEN.search(safe_repr(error, str)))


def _signal_name(number: int) -> str:
    named = number in signal.valid_signals() and number < signal.SIGRTMIN
    return signal.Signals(number).name if named else f"signal {number}"
