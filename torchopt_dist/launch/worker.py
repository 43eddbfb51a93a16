"""Task → its function's value or exception, in a process with torchrun's variables and an output of its own."""

from __future__ import annotations

import contextlib
import linecache
import os
import signal
import socket
import sys
from typing import NoReturn

from torchopt_dist._network import choose_interface
from torchopt_dist.launch.duties import asked_to_exit, describe, leave, read_task, settle, write_value
from torchopt_dist.launch.meeting import LOOPBACK
from torchopt_dist.launch.messages import Header, Raised, Returned, Running, StartWorker, pack, send, unpack

__all__ = ["work"]


def work(start: StartWorker, channel_end: int, stdout: int, stderr: int, header: int, task: int) -> NoReturn:
    """Run the function, send what came of it, and end as a Python program ends."""
    channel = socket.socket(fileno=channel_end)
    _take_over_output(stdout, stderr)
    code = 1
    try:
        _take_over(unpack(header), start)
        function, args, kwargs = read_task(task, unpack)
        send(channel, Running())
        value = function(*args, **kwargs)
        _send(channel, Returned(), write_value(value, start.rank, pack))
        code = 0
        del function, args, kwargs, value
    except BaseException as error:
        asked = asked_to_exit(error)
        code = 1 if asked is None else asked
        _send(channel, Raised(asked), pack(describe(error)))
    channel.close()
    leave(code)


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
    # Where torch's `record` writes an exception. What is raised here is sent, so the file needs no name.
    error_file = os.memfd_create("todist", os.MFD_CLOEXEC)
    os.environ["TORCHELASTIC_ERROR_FILE"] = f"/proc/{os.getpid()}/fd/{error_file}"
    if os.environ["MASTER_ADDR"] != LOOPBACK:  # torch's libraries would guess the interface
        choose_interface(os.environ["MASTER_ADDR"])
    settle(start.rank)


def _send(channel: socket.socket, message: Returned | Raised, packed: int) -> None:
    with contextlib.suppress(OSError):  # the launcher has ended, and soon so will this process
        send(channel, message, packed)
    os.close(packed)
