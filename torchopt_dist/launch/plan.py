"""What a launch is to do: what, where, and how long it may take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torchopt_dist.launch.cluster import Host
from torchopt_dist.launch.logs import WorkerLogs
from torchopt_dist.launch.machine import Machine

__all__ = ["Orders", "Plan", "Times"]


@dataclass(frozen=True)
class Orders:
    """What the workers on one machine take over from the launcher.

    Attributes:
        env: the environment.
        header: descriptor of the packed :class:`~torchopt_dist.launch.messages.Header`.
    """

    env: Mapping[str, str]
    header: int


@dataclass(frozen=True)
class Times:
    """How long a launch waits, in seconds.

    Attributes:
        begun: when the launch has begun, by ``time.monotonic``.
        whole: for all functions to return, since then; ``None`` means as long as it takes.
        start: for all workers to be about to call their functions.
        stop: for workers that are told to stop, before they are killed.
        exit: for processes whose function has returned to end.
        agent: for a sign of life of an agent.
        halted: for a worker that a signal has stopped to go on; ``None`` means as long as it takes.
    """

    begun: float
    whole: float | None
    start: float
    stop: float
    exit: float
    agent: float
    halted: float | None


@dataclass(frozen=True)
class Plan:
    """All that a launch is to do.

    Attributes:
        hosts: where, and how many workers.
        orders: machine → what its workers take over; who asks closes the header.
        task: descriptor of the packed function and its arguments.
        port: where the store listens at which hosts or workers meet; 0 means any free port.
        logs: where the workers' output goes.
        times: how long to wait.
        run_id: a name of this launch that no other has.
        max_restarts: how often workers may fail and are started again.
    """

    hosts: list[Host]
    orders: Callable[[Machine], Orders]
    task: int
    port: int
    logs: WorkerLogs
    times: Times
    run_id: str
    max_restarts: int
