"""Task → its function's value or exception, in a process that torch's agent has forked, and as the agent reads it."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import cloudpickle
import setproctitle

from torchopt_dist.errors import SerializationError
from torchopt_dist.failure import RemoteFailure
from torchopt_dist.launch.agent import PR_SET_PDEATHSIG, libc
from torchopt_dist.launch.elastic.output import Output
from torchopt_dist.launch.failures import may_be_an_echo
from torchopt_dist.launch.messages import unpack

__all__ = ["Work"]


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

    def forget(self) -> None:
        """The workers are about to be started again."""
        for answer in self._answers:
            os.ftruncate(answer, 0)

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

    def run(self) -> None:
        """The life of a worker, in a process forked by torch."""
        local_rank = int(os.environ["LOCAL_RANK"])
        rank = int(os.environ["RANK"])
        _become_worker(self._output, local_rank, rank)
        answer = self._answers[local_rank]
        try:
            function, args, kwargs = _load(self._task)
            value = function(*args, **kwargs)
            _write(answer, (True, _dump(value, rank)))
            del function, args, kwargs, value
        except BaseException as error:
            code: object = error.code if isinstance(error, SystemExit) else 1
            status = code if isinstance(code, int) else int(code is not None)
            asked = isinstance(error, SystemExit)
            echo = isinstance(error, Exception) and may_be_an_echo(error)
            text = f"called sys.exit({status})" if asked else f"{type(error).__name__}: {error}"
            told = None if asked else _describe(error)
            _write(answer, (False, asked, status, told, echo, text))
            _leave(status or 1)
        with contextlib.suppress(Exception):
            atexit._run_exitfuncs()
        _flush()


def _become_worker(output: Output, local_rank: int, rank: int) -> None:
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    output.become_worker(local_rank, rank)
    setproctitle.setproctitle(f"todist: rank {rank} of {os.environ['WORLD_SIZE']}: {' '.join(sys.argv)}")
    threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    count = int(threads) if threads.isdecimal() and int(threads) else len(os.sched_getaffinity(0))
    importlib.import_module("torch").set_num_threads(count)
    importlib.import_module("numpy.random").seed()


def _load(task: bytes) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    try:
        loaded: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] = cloudpickle.loads(task)
    except Exception as error:
        raise SerializationError(
            f"the function or its arguments cannot be read on the worker: {type(error).__name__}: {error}"
        ) from error
    return loaded


def _dump(value: object, rank: int) -> bytes:
    try:
        dumped: bytes = cloudpickle.dumps(value)
    except Exception as error:
        raise SerializationError(
            f"rank {rank} returned {type(value).__name__} {value!r:.200}, which cannot be sent to the launcher: "
            f"{type(error).__name__}: {error}"
        ) from None
    return dumped


def _describe(error: BaseException) -> tuple[str, bytes]:
    failure = RemoteFailure.of(error)
    try:
        return failure.traceback, cloudpickle.dumps(failure)
    except Exception:  # its parts can be sent one by one, and yet not together
        return failure.traceback, b""


def _write(answer: int, said: tuple[Any, ...]) -> None:
    with open(answer, "wb", closefd=False) as file:
        file.seek(0)
        cloudpickle.dump(said, file)


def _leave(status: int) -> NoReturn:
    """A worker that has failed ends as a program does, but for what torch would write on its standard error."""
    try:
        atexit._run_exitfuncs()
    finally:
        _flush()
        os._exit(status)


def _flush() -> None:
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
