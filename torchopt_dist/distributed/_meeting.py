"""Workers → the process group that they enter together; its waits end when one of them is lost."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeAlias

import torch.distributed as dist

from torchopt_dist.distributed.calls.gather import gather
from torchopt_dist.distributed.group.group import Group, answering_group
from torchopt_dist.process import network
from torchopt_dist.process.future import Future
from torchopt_dist.process.threads import settle_in_thread

__all__ = ["beside", "check_of", "meet"]

Enter: TypeAlias = Callable[..., object]
"""A function of a module: ``enter(group, store, ranks, *args)`` makes this worker's part of the process group."""


def meet(group: Group, ranks: Sequence[int], enter: Enter, *args: Any, seconds: float) -> None:
    """Let workers enter a process group, this one among them, whose store they use.

    Args:
        group: the workers that there are.
        ranks: those that enter, in ascending order.
        enter: enters; it is called on each of them.
        args: its further arguments.
        seconds: how long they may take.
    """
    started = time.monotonic()
    host = network.local_address(os.environ.get("MASTER_ADDR", "127.0.0.1"))
    store = _store_at(host, 0, seconds, is_master=True)
    others = [rank for rank in ranks if rank != group.rank]
    entered = {
        rank: group.ask(rank, _enter, host, store.port, seconds, ranks, enter, args) for rank in others
    }
    entered[group.rank] = beside(group, partial(enter, group, store, ranks, *args))
    gather(entered, group.names, seconds, started)


def beside(group: Group, work: Callable[[], object]) -> Future[list[Any]]:
    """Do work in another thread that waits in C++ for workers, since one of them may be lost meanwhile."""
    future: Future[list[Any]] = Future()
    settle_in_thread(group.threads, work, future, group.names[group.rank])
    return future


def check_of(group: Group, ranks: Sequence[int]) -> Callable[[], None]:
    """A function that raises :class:`WorkerLostError` if one of these workers is lost."""

    def check() -> None:
        for rank in ranks:
            if rank in group.membership.failures:
                raise group.membership.loss_of(rank)

    return check


def _enter(host: str, port: int, seconds: float, ranks: Sequence[int], enter: Enter, args: Any) -> None:
    """On another worker: enter the process group."""
    enter(answering_group(), _store_at(host, port, seconds, is_master=False), ranks, *args)


def _store_at(host: str, port: int, seconds: float, *, is_master: bool) -> dist.TCPStore:
    """Where the workers meet; the one that asks the others keeps it."""
    limit = timedelta(seconds=seconds)
    return dist.TCPStore(host, port, None, is_master=is_master, wait_for_workers=False, timeout=limit)
