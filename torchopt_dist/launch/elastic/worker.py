"""Task → its function's value or exception, in a process that torch's agent has forked, and as the agent reads it."""

from __future__ import annotations

import mmap
import os
import signal
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NoReturn

import cloudpickle

from torchopt_dist._serialized_exception import safe_repr
from torchopt_dist.launch.agent import PR_SET_PDEATHSIG, libc
from torchopt_dist.launch.duties import asked_to_exit, describe, leave, read_task, settle, write_value
from torchopt_dist.launch.elastic.output import Output
from torchopt_dist.launch.failures import may_be_an_echo
from torchopt_dist.launch.messages import unpack

__all__ = ["State", "Work"]


class State(IntEnum):
    """How far a worker is: its function is about to be called, and then has ended, one way or the other."""

    STARTING = 0
    RUNNING = 1
    RETURNED = 2
    RAISED = 3


class Work:
    """What the workers of this host do, in each world anew, and what came of it.

    Args:
        task: the packed function and its arguments.
        workers: how many there are.
        output: where their lines go.
    """

    def __init__(self, task: bytes, workers: int, output: Output) -> None:
        self._task, self._output = task, output
        self._answers = [os.memfd_create("todist", os.MFD_CLOEXEC) for _ in range(workers)]
        self._states = mmap.mmap(-1, workers)  # which forked processes share

    def forget(self) -> None:
        """The workers are about to be started again."""
        for local_rank, answer in enumerate(self._answers):
            os.ftruncate(answer, 0)
            self._states[local_rank] = State.STARTING

    @property
    def states(self) -> Sequence[State]:
        """Those of the workers, by local rank."""
        return [State(state) for state in self._states[:]]

    def said(self, local_rank: int) -> Any:
        """What a worker has said, if it came to that.

        Returns:
            ``(True, packed value)``, or ``(False, ...)`` and the parts of a
            :class:`~torchopt_dist.launch.elastic.records.WorkerFailure` but for its rank; ``None`` if it said nothing.
        """
        answer = self._answers[local_rank]
        if not os.fstat(answer).st_size:
            return None
        try:
            return unpack(os.dup(answer))
        except Exception:  # it was ended while it spoke
            return None

    def run(self) -> NoReturn:
        """The life of a worker, in a process forked by torch."""
        local_rank = int(os.environ["LOCAL_RANK"])
        rank = int(os.environ["RANK"])
        code = 0
        try:
            _become_worker(self._output, local_rank, rank)
            function, args, kwargs = read_task(self._task, cloudpickle.loads)
            self._states[local_rank] = State.RUNNING
            value = function(*args, **kwargs)
            self._say(local_rank, State.RETURNED, (True, write_value(value, rank, cloudpickle.dumps)))
            del function, args, kwargs, value
        except BaseException as error:
            asked = asked_to_exit(error)
            code = 1 if asked is None else asked
            echo = isinstance(error, Exception) and may_be_an_echo(error)
            text = (
                f"called sys.exit({code})"
                if asked is not None
                else f"{type(error).__name__}: {safe_repr(error, str)}"
            )
            failure = describe(error) if asked is None else None
            self._say(local_rank, State.RAISED, (False, asked is not None, code, failure, echo, text))
        leave(code)

    def _say(self, local_rank: int, state: State, said: tuple[Any, ...]) -> None:
        with open(self._answers[local_rank], "wb", closefd=False) as file:
            file.seek(0)
            cloudpickle.dump(said, file)
        self._states[local_rank] = state


def _become_worker(output: Output, local_rank: int, rank: int) -> None:
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    output.become_worker(local_rank, rank)
    settle(rank)
