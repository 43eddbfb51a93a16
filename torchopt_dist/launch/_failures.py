"""What became of workers → the one error to raise: the cause, and not what followed from it."""

from __future__ import annotations

import re
import signal
import time

import torch.distributed as dist

from torchopt_dist._serialized_exception import safe_repr
from torchopt_dist.errors import (
    PeerFailedError,
    WorkerFailedError,
    WorkerLostError,
)

__all__ = ["EXIT_SECONDS", "Failures", "death", "halt", "may_be_an_echo"]

ECHO_SECONDS, EXIT_SECONDS = 1.0, 0.25
"""How long an error waits for another one that may have caused it: one of a broken connection, and an exit."""
LINES_IN_MESSAGE, LONGEST_IN_MESSAGE = 10, 1000
"""The last lines of a log, and the first characters of each."""
BROKEN = re.compile(
    "connection (was )?(closed|reset|refused|aborted)|broken pipe|socket closed", re.IGNORECASE
)


class Failures:
    """The errors of one attempt so far."""

    def __init__(self) -> None:
        self._known: list[tuple[float, float, Exception]] = []

    def add(self, error: Exception, wait: float | None = None) -> None:
        """Take note of an error.

        Args:
            error: the error.
            wait: seconds in which its cause may still become known; ``None`` means that the error itself tells.
        """
        if wait is None:
            wait = ECHO_SECONDS if may_be_an_echo(error) else 0.0
        self._known.append((wait, time.monotonic() + wait, error))

    def raise_cause(self, all_known: bool) -> None:
        """Raise the likeliest cause, if it is time to, or if it is known how all workers ended."""
        if self._known:
            _, until, error = min(self._known, key=lambda known: known[0])  # of equals, the first
            if all_known or time.monotonic() >= until:
                raise error

    def times(self) -> list[float]:
        """When :meth:`raise_cause` is worth another call, by ``time.monotonic``."""
        return [until for _, until, _ in self._known]

    def clear(self) -> None:
        """Forget them: one has been raised, and what comes now follows from that."""
        self._known.clear()


def may_be_an_echo(error: Exception) -> bool:
    """Whether the error may follow from another worker's: somebody hung up."""
    if isinstance(error, (PeerFailedError, WorkerLostError, ConnectionError, dist.DistError)):
        return True
    return isinstance(error, RuntimeError) and bool(BROKEN.search(safe_repr(error, str)))


def death(
    rank: int, host: str, status: int, log: tuple[str, ...], *, asked: bool, out_of_memory: bool = False
) -> WorkerFailedError:
    """The error that tells of a worker's end.

    Args:
        rank: its rank.
        host: its host.
        status: its exit code, or minus the number of a signal.
        log: its last lines.
        asked: whether it was ``sys.exit``.
        out_of_memory: whether the kernel has killed a process there for lack of memory.
    """
    if status < 0:
        name, code, how = _signal_name(-status), None, f"was ended by {_signal_name(-status)}"
        if out_of_memory:
            how += " (the kernel has killed processes there for lack of memory)"
    else:
        name, code, how = (
            None,
            status,
            f"called sys.exit({status})" if asked else f"exited with code {status}",
        )
    text = f"rank {rank} on {host} {how} before its function returned{_said(log)}"
    return WorkerFailedError(text, rank=rank, host=host, exit_code=code, signal=name, log=log)


def halt(rank: int, host: str, number: int, seconds: float, log: tuple[str, ...]) -> WorkerFailedError:
    """The error that tells of a worker that the signal of this number has stopped, and that has not gone on."""
    name = _signal_name(number)
    text = f"rank {rank} on {host} was stopped by {name} and did not go on for {seconds:g} s{_said(log)}"
    return WorkerFailedError(text, rank=rank, host=host, exit_code=None, signal=name, log=log)


def _signal_name(number: int) -> str:
    named = number in signal.valid_signals() and number < signal.SIGRTMIN
    return signal.Signals(number).name if named else f"signal {number}"


def _said(log: tuple[str, ...]) -> str:
    if not log:
        return "; its log is empty"
    lines = []
    for line in log[-LINES_IN_MESSAGE:]:
        more = len(line) - LONGEST_IN_MESSAGE
        cut = f"{line[:LONGEST_IN_MESSAGE]} ... and {more} more characters" if more > 0 else line
        lines.append(f"    {cut}")
    return "; the last lines of its log:\n" + "\n".join(lines)
