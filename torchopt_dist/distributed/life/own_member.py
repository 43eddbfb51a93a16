"""The environment, this process → this worker's data for the others."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Callable
from dataclasses import replace

from torchopt_dist.distributed.membership.members import Member, OnLoss
from torchopt_dist.distributed.membership.stopped import process_table
from torchopt_dist.distributed.rendezvous.environment import WorldInfo
from torchopt_dist.errors import InitializationError

__all__ = ["named", "own_incarnation", "own_member"]

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
