"""A task → the values of the first attempt that succeeds: hosts stay the same, workers are started again."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from typing import Any

from torchopt_dist.errors import RemoteError, WorkerFailedError
from torchopt_dist.launch.cluster import Host
from torchopt_dist.launch.job import Job, Orders, Times
from torchopt_dist.launch.logs import WorkerLogs
from torchopt_dist.launch.machine import Machine

__all__ = ["run_attempts"]

log = logging.getLogger(__package__)


def run_attempts(
    *,
    hosts: list[Host],
    orders: Callable[[Machine], Orders],
    task: int,
    port: int,
    logs: WorkerLogs,
    times: Times,
    run_id: str,
    max_restarts: int,
) -> dict[str, list[Any]]:
    """Run a task until it succeeds, or has failed once too often.

    Args:
        hosts: where, and how many workers.
        orders: machine → what its workers take over. The descriptor is closed here.
        task: descriptor of the packed function and its arguments.
        port: where the workers' store listens; 0 means any free port.
        logs: where the workers' output goes.
        times: how long an attempt waits.
        run_id: a name of this launch that no other has.
        max_restarts: how many further attempts there may be, when what a worker raised or its end was the cause.

    Returns:
        The values, by host.

    Raises:
        Exception: as :meth:`~torchopt_dist.launch.job.Job.run`.
    """
    restarts = 0
    with contextlib.ExitStack() as afterwards:
        given: dict[Machine, Orders] = {}
        for machine in {host.machine for host in hosts}:
            given[machine] = orders(machine)
            afterwards.callback(os.close, given[machine].header)
        while True:
            job = Job(
                hosts=hosts,
                orders=given,
                task=task,
                port=port,
                logs=logs,
                times=times,
                run_id=run_id,
                restarts=restarts,
                max_restarts=max_restarts,
            )
            try:
                values = job.run()
            except (RemoteError, WorkerFailedError) as error:
                if restarts == max_restarts:
                    raise
                restarts += 1
                log.warning("restart %d of %d: %s", restarts, max_restarts, error)
                logs.forget_tails()
            else:
                return {host.name: values[host.first_rank : host.first_rank + host.workers] for host in hosts}
