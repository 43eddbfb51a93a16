"""Task → its function's value or exception, in a process with torchrun's variables and an output of its own."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import linecache
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import cloudpickle
import setproctitle

from torchopt_dist.errors import SerializationError
from torchopt_dist.failure import RemoteFailure
from torchopt_dist.launch.meeting import LOOPBACK
from torchopt_dist.launch.messages import Header, Raised, Returned, Running, StartWorker, pack, send, unpack
from torchopt_dist.network import choose_interface

__all__ = ["work"]


def work(start: StartWorker, channel_end: int, stdout: int, stderr: int, header: int, task: int) -> NoReturn:
    """Run the function, send what came of it, and end as a Python program ends."""
    channel = socket.socket(fileno=channel_end)
    _take_over_output(stdout, stderr)
    code: object = 1
    try:
        _take_over(unpack(header), start)
        function, args, kwargs = _load(task)
        send(channel, Running())
        value = function(*args, **kwargs)
        _send_value(channel, value, int(os.environ["RANK"]))
        code = 0
        del function, args, kwargs, value
    except BaseException as error:
        code = error.code if isinstance(error, SystemExit) else 1
        if code is None:
            code = 0
        elif not isinstance(code, int):
            code = 1
        _send_packed(
            channel, Raised(code if isinstance(error, SystemExit) else None), RemoteFailure.of(error)
        )
    channel.close()
    _leave(code if isinstance(code, int) else 1)


def _take_over_output(stdout: int, stderr: int) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    for here, there in ((null, 0), (stdout, 1), (stderr, 2)):
        os.dup2(here, there)
        os.close(here)
    # A line is one write, so that lines of several processes do not mix.
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]


def _take_over(header: Header, start: StartWorker) -> None:
    os.environ.clear()
    os.environ.update({**header.env, **start.env})
    sys.path[:] = header.path
    sys.argv[:] = header.argv
    linecache.cache.update(header.sources)
    os.chdir(header.folder)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    world_size = os.environ["WORLD_SIZE"]
    setproctitle.setproctitle(f"todist: rank {start.rank} of {world_size}: {' '.join(header.argv)}")
    # Where torch's `record` writes an exception. What is raised here is sent, so the file needs no name.
    error_file = os.memfd_create("todist", os.MFD_CLOEXEC)
    os.environ["TORCHELASTIC_ERROR_FILE"] = f"/proc/{os.getpid()}/fd/{error_file}"
    if os.environ["MASTER_ADDR"] != LOOPBACK:  # torch's libraries would guess the interface
        choose_interface(os.environ["MASTER_ADDR"])
    # What a fresh process does when these are imported, and a forked one must do itself.
    importlib.import_module("torch").set_num_threads(_threads())
    importlib.import_module("numpy.random").seed()


def _threads() -> int:
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(asked) if asked.isdecimal() and int(asked) else len(os.sched_getaffinity(0))


def _load(task: int) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    try:
        loaded: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] = unpack(task)
    except Exception as error:
        raise SerializationError(
            f"the function or its arguments cannot be read on the worker: {type(error).__name__}: {error}"
        ) from error
    return loaded


def _send_value(channel: socket.socket, value: object, rank: int) -> None:
    try:
        packed = pack(value)
    except Exception as error:
        raise SerializationError(
            f"rank {rank} returned {type(value).__name__} {value!r:.200}, which cannot be sent to the launcher: "
            f"{type(error).__name__}: {error}"
        ) from None
    _send_descriptor(channel, Returned(), packed)


def _send_packed(channel: socket.socket, message: Raised, failure: RemoteFailure) -> None:
    try:
        pickled = cloudpickle.dumps(failure)
    except Exception:  # its parts can be sent one by one, and yet not together
        pickled = b""
    _send_descriptor(channel, message, pack((failure.traceback, pickled)))


def _send_descriptor(channel: socket.socket, message: Returned | Raised, packed: int) -> None:
    with contextlib.suppress(OSError):  # the launcher has ended, and soon so will this process
        send(channel, message, packed)
    os.close(packed)


def _leave(code: int) -> NoReturn:
    """The end of an interpreter, without going back through the forkserver's frames."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)
