"""The environment, this process → this worker's data for the others, and whether it has what a group needs.

Where Gloo, TensorPipe and ZeroMQ cannot open a file, they raise errors of their own, abort the process, or wait. When
the process that has started this worker has ended, there is a call, so that no worker is left behind.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import replace

from torchopt_dist.distributed.membership.members import Member, OnLoss
from torchopt_dist.distributed.membership.stopped import process_table
from torchopt_dist.distributed.rendezvous.environment import WorldInfo
from torchopt_dist.errors import InitializationError

__all__ = ["ParentWatch", "check_descriptors", "named", "own_incarnation", "own_member", "too_many_files"]


VARIABLE = "TODIST_INCARNATION"
"""Set by a launch with ``on_loss="replace"``: 0 for the first processes, and one more for each that replaces a lost
one."""


def own_incarnation(on_loss: OnLoss, world_size: int) -> int:
    """This process's incarnation; raises ``InitializationError`` if it is bad, or the launcher lacks ``on_loss``."""
    text = os.environ.get(VARIABLE)
    if text is None:
        if on_loss == "replace" and world_size > 1:
            raise InitializationError(
                "on_loss='replace' needs a launcher that starts a new process for a lost worker, which torchrun does "
                "not: start the program by `todist.launch(..., on_loss='replace')` or `python -m torchopt_dist launch "
                "--on-loss replace`, or let the others go on without it, by on_loss='continue'"
            )
        return 0
    if on_loss != "replace":
        raise InitializationError(
            "the workers were launched with on_loss='replace', and `auto_init_rpc` must have the same, got "
            f"on_loss={on_loss!r}"
        )
    if not text.isdecimal() or int(text) >= 1 << 16:
        raise InitializationError(
            f"the environment variable {VARIABLE} must be a number below 65536, got {text!r}"
        )
    return int(text)


def own_member(world: WorldInfo, on_loss: OnLoss, incarnation: int) -> Member:
    """This process, as the others are to know it."""
    return Member(
        world.rank,
        world.worker_name,
        _program(),
        socket.gethostname(),
        on_loss,
        os.getpid(),
        process_table(),
        incarnation=incarnation,
    )


def named(world: WorldInfo, worker_name_format: Callable[..., str]) -> WorldInfo:
    """Name this worker; raises ``InitializationError`` if ``worker_name_format`` does not return a valid name."""
    name = worker_name_format(
        world_rank=world.world_rank,
        world_size=world.world_size,
        local_rank=world.local_rank,
        local_world_size=world.local_world_size,
    )
    if not isinstance(name, str) or not re.fullmatch("[A-Za-z0-9_:-]{1,127}", name):
        raise InitializationError(
            "worker_name_format must return 1 to 127 letters, digits, '-', '_' and ':', "
            f"got {type(name).__name__} {name!r:.200}"
        )
    return replace(world, worker_name=name)


def _program() -> str:
    """The path of the script that is ``__main__``; empty where there is none, as in a notebook."""
    path = getattr(sys.modules["__main__"], "__file__", None)
    return os.path.realpath(path) if path else ""


def check_descriptors(number: int) -> None:
    """Check that so many files can be opened; raises ``InitializationError`` if not."""
    with contextlib.ExitStack() as opened:
        for count in range(number):
            try:
                opened.callback(os.close, os.open(os.devnull, os.O_RDONLY))
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    raise
                raise _too_many(f"needs at least {number} more, and can have {count}") from error


def too_many_files(error: BaseException) -> InitializationError | None:
    """The error to raise in place of a library's error that no file can be opened; ``None`` for other errors."""
    if isinstance(error, InitializationError) or "too many open files" not in str(error).lower():
        return None
    return _too_many("could not open all that it needs")


def _too_many(what: str) -> InitializationError:
    import resource  # which only Unix has, and only there a limit is met

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return InitializationError(
        f"too many open files: this worker {what}, where the limit of open files (`ulimit -n`) is {limit}: raise it"
    )


class ParentWatch:
    """Context manager that calls ``orphaned``, in a thread of its own, when torchrun's agent or a launcher has ended.

    Other parents, such as a shell, may end before the program. The signal that the kernel sends when a parent dies
    would come when the parent's *thread* ends that has started this process, and leave ``main`` no time for ``finally``
    blocks.
    """

    def __init__(self, interval: float, orphaned: Callable[[], None]) -> None:
        self._interval = interval
        self._orphaned = orphaned
        self._left = threading.Event()
        self._parent = os.getppid()

    def __enter__(self) -> None:
        if "TORCHELASTIC_RUN_ID" in os.environ:
            threading.Thread(target=self._watch, name="todist-parent", daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self._left.set()

    def _watch(self) -> None:
        while not self._left.wait(self._interval):
            if os.getppid() != self._parent:
                self._orphaned()
                return
