"""A host → the job that runs there: its news and its workers' lines, and what it ends with."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import logging
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousError

from torchopt_dist.errors import AgentFailedError, InitializationError, RemoteError, WorkerFailedError
from torchopt_dist.launch.cluster import Host
from torchopt_dist.launch.elastic.host import serve
from torchopt_dist.launch.elastic.records import Done, Failed, Place
from torchopt_dist.launch.elastic.store import RendezvousStore
from torchopt_dist.launch.job import Job
from torchopt_dist.launch.logs import WorkerLogs
from torchopt_dist.launch.machine import Machine
from torchopt_dist.launch.messages import pack
from torchopt_dist.launch.plan import Orders, Plan

__all__ = ["PATIENCE", "HandlerError", "HostJob", "HostJobs", "Stopped", "is_loss"]

log = logging.getLogger("torchopt_dist.launch")

PATIENCE = 0.05
"""Until a job sees that it is told to stop."""
OWN_WORDS = 30


class Stopped(BaseException):
    """Raised in a host's job that is told to stop."""


class HandlerError(Exception):
    """A handler of ``logging`` has raised: that ends the launch, and tells nothing of a host.

    Args:
        error: what it has raised.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class HostJob(Job):
    """A job that another thread can stop.

    Args:
        stop: set when it is to end.
        plan: what is to be done.
        orders: for each machine, what its worker takes over.
    """

    def __init__(self, stop: threading.Event, plan: Plan, orders: Mapping[Machine, Orders]) -> None:
        super().__init__(plan, orders)
        self._stop = stop

    def _patience(self, now: float, returned_at: float | None) -> float | None:
        if self._stop.is_set():
            raise Stopped
        patience = super()._patience(now, returned_at)
        return PATIENCE if patience is None else min(patience, PATIENCE)


@dataclass(frozen=True)
class HostJobs:
    """What the jobs of all hosts of a launch have in common.

    Attributes:
        plan: what the launch is to do.
        place: what a host is told, but for what is its own.
        task: the packed function and its arguments.
        store: that of the rendezvous.
    """

    plan: Plan
    place: Place
    task: bytes
    store: RendezvousStore

    def run(self, host: Host, stop: threading.Event, tell: Callable[[dict[str, Any]], None]) -> Done | Failed:
        """Run the job of one host, with one worker, until it ends.

        Args:
            host: which has been reached.
            stop: set when it is to end.
            tell: called with each of its news.

        Raises:
            BaseException: what ended it otherwise, see :func:`is_loss`.
        """
        machine = host.machine
        self.store.note_reached(machine)
        place = dataclasses.replace(
            self.place,
            name=host.name,
            workers=host.workers,
            address=self.store.address_for(machine),
            here=machine.here,
        )
        with contextlib.ExitStack() as files:
            task = pack((serve, (place, self.task), {}))
            files.callback(os.close, task)
            orders = self.plan.orders(machine)
            files.callback(os.close, orders.header)
            plan = dataclasses.replace(
                self.plan,
                hosts=[dataclasses.replace(host, workers=1, first_rank=0)],
                task=task,
                port=0,
                logs=_HostLogs(self.plan.logs, place.mark, tell),
                times=dataclasses.replace(self.plan.times, whole=None),
                max_restarts=0,
            )
            (ending,) = HostJob(stop, plan, {machine: orders}).run()
            return ending


def is_loss(event: object) -> bool:
    """Whether a job's end means that its host is lost, and not that the launch is wrong."""
    if isinstance(event, RemoteError):
        return isinstance(event, (ConnectionError, TimeoutError, dist.DistError, RendezvousError))
    return isinstance(event, (AgentFailedError, WorkerFailedError, InitializationError, OSError))


class _HostLogs(WorkerLogs):
    """A host's lines → its workers' lines, and its news."""

    def __init__(self, logs: WorkerLogs, mark: str, tell: Callable[[dict[str, Any]], None]) -> None:
        self._logs, self._mark, self._tell = logs, mark, tell
        self._own: collections.deque[str] = collections.deque(maxlen=OWN_WORDS)

    def write(self, line: str, rank: int, local_rank: int, host: str, stream: str) -> None:
        """Hand on one line."""
        if not line.startswith(self._mark):
            self._own.append(line)
            log.debug("%s: %s", host, line)
            return
        said = line.removeprefix(self._mark)
        kind, text = said[0], said[1:]
        if kind == "!":
            self._tell(json.loads(text))
            return
        of_rank, of_local_rank, said = text.split(" ", 2)
        stream = "stdout" if kind == "o" else "stderr"
        try:
            self._logs.write(said, int(of_rank), int(of_local_rank), host, stream)
        except Exception as error:
            raise HandlerError(error) from error

    def tail(self, rank: int) -> tuple[str, ...]:
        """The last words of the host itself."""
        return tuple(self._own)
