"""What a launch is to do: what, where, and by which options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torchopt_dist.launch._cluster import Host
from torchopt_dist.launch._machine import Machine
from torchopt_dist.launch.logs import WorkerLogs
from torchopt_dist.launch.options import LaunchOptions

__all__ = ["Plan", "WorkerSetup"]


@dataclass(frozen=True)
class WorkerSetup:
    """What the workers on one machine take over from the launcher.

    Attributes:
        env: the environment.
        header: the packed :class:`~torchopt_dist.launch._messages.Header`.
    """

    env: Mapping[str, str]
    header: bytes


@dataclass(frozen=True)
class Plan:
    """All that a launch is to do.

    Attributes:
        options: those that the launcher was given.
        begun: when the launch has begun, by ``time.monotonic``.
        hosts: where, and how many workers.
        setup: machine → what its workers take over.
        task: the packed function and its arguments.
        logs: where the workers' output goes.
        run_id: a name of this launch that no other has.
    """

    options: LaunchOptions
    begun: float
    hosts: list[Host]
    setup: Callable[[Machine], WorkerSetup]
    task: bytes
    logs: WorkerLogs
    run_id: str
