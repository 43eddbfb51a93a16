"""How a worker ended → the error that tells of it; an error → how long its cause may still become known."""

from __future__ import annotations

import re
import signal

import torch.distributed as dist

from torchopt_dist._serialized_exception import safe_repr
from torchopt_dist.errors import PeerFailedError, WorkerFailedError, WorkerLostError
from torchopt_dist.launch._handles import WorkerHandle

__all__ = ["ECHO_SECONDS", "EXIT_SECONDS", "death", "halt", "may_be_an_echo"]

ECHO_SECONDS, EXIT_SECONDS = 1.0, 0.25
"""How long an error waits for another one that may have caused it: one of a broken connection, and an exit."""
LINES_IN_MESSAGE, LONGEST_IN_MESSAGE = 10, 1000
"""The last lines of a log, and the first characters of each."""
BEFORE = " before its function returned"
BROKEN = re.compile(
    "connection (was )?(closed|reset|refused|aborted)|broken pipe|socket closed", re.IGNORECASE
)


def may_be_an_echo(error: Exception) -> bool:
    """Whether the error may follow from another worker's: somebody hung up."""
    if isinstance(error, (PeerFailedError, WorkerLostError, ConnectionError, dist.DistError)):
        return True
    return isinstance(error, RuntimeError) and bool(BROKEN.search(safe_repr(error, str)))


def death(
    worker: WorkerHandle, status: int, *, asked: bool = False, out_of_memory: bool = False
) -> WorkerFailedError:
    """The error that tells of a worker's end.

    Args:
        worker: which.
        status: its exit code, or minus the number of a signal.
        asked: whether it was ``sys.exit``.
        out_of_memory: whether the kernel has killed a process there for lack of memory.
    """
    if status < 0:
        why = " (the kernel has killed processes there for lack of memory)" if out_of_memory else ""
        return _failure(worker, "was ended by {}" + why + BEFORE, by_signal=-status)
    how = f"called sys.exit({status})" if asked else f"exited with code {status}"
    return _failure(worker, how + BEFORE, exit_code=status)


def halt(worker: WorkerHandle, number: int, seconds: float) -> WorkerFailedError:
    """The error that tells of a worker that the signal of this number has stopped, and that has not gone on."""
    return _failure(worker, f"was stopped by {{}} and did not go on for {seconds:g} s", by_signal=number)


def _failure(
    worker: WorkerHandle, how: str, *, by_signal: int | None = None, exit_code: int | None = None
) -> WorkerFailedError:
    name = None if by_signal is None else _signal_name(by_signal)
    log = worker.tail()
    return WorkerFailedError(
        f"{worker} {how.format(name)}{_said(log)}",
        rank=worker.rank,
        host=worker.host,
        exit_code=exit_code,
        signal=name,
        log=log,
    )


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
