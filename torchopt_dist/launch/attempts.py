"""A task → the values of the first attempt that succeeds: hosts stay the same, workers are started again."""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Any

from torchopt_dist.errors import RemoteError, WorkerFailedError
from torchopt_dist.launch.job import Job
from torchopt_dist.launch.machine import Machine
from torchopt_dist.launch.plan import Orders, Plan

__all__ = ["run_attempts"]

log = logging.getLogger(__package__)


def run_attempts(plan: Plan) -> dict[str, list[Any]]:
    """Run a task until it succeeds, or has failed once too often.

    Args:
        plan: what is to be done. There is another attempt when what a worker raised, or its end, was the cause.

    Returns:
        The values, by host.

    Raises:
        Exception: as :meth:`~torchopt_dist.launch.job.Job.run`.
    """
    restarts = 0
    with contextlib.ExitStack() as afterwards:
        given: dict[Machine, Orders] = {}
        for machine in {host.machine for host in plan.hosts}:
            given[machine] = plan.orders(machine)
            afterwards.callback(os.close, given[machine].header)
        while True:
            try:
                values = Job(plan, given, restarts).run()
            except (RemoteError, WorkerFailedError) as error:
                if restarts == plan.max_restarts:
                    raise
                restarts += 1
                log.warning("restart %d of %d: %s", restarts, plan.max_restarts, error)
                plan.logs.forget_tails()
            else:
                return {
                    host.name: values[host.first_rank : host.first_rank + host.workers] for host in plan.hosts
                }
