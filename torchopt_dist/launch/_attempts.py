"""A task → the values of the first attempt that succeeds: others follow failures, and hosts that come or go."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from typing import Any

from torchopt_dist._serialized_exception import safe_repr
from torchopt_dist.errors import AgentFailedError, InitializationError, RemoteError, WorkerFailedError
from torchopt_dist.launch._elastic import Membership
from torchopt_dist.launch._job import Job, StoppedError
from torchopt_dist.launch._plan import Plan

__all__ = ["run_attempts"]

log = logging.getLogger(__package__)


def run_attempts(plan: Plan, membership: Membership | None = None) -> dict[str, list[Any]]:
    """Run a task until it succeeds, or workers have failed once too often.

    Args:
        plan: what is to be done. There is another attempt when what a worker raised, or its end, was the cause.
        membership: which hosts take part in each attempt. There is another attempt when hosts were lost, or have come,
            and these do not count. ``None``: those of the plan, and the loss of one is an error.

    Returns:
        The values, by host.

    Raises:
        Exception: as :meth:`~torchopt_dist.launch._job.Job.run` and :meth:`~Membership.next_hosts`.
    """
    failures, most = 0, plan.options.max_restarts
    for attempt in itertools.count():
        if membership is not None:
            plan = dataclasses.replace(plan, hosts=membership.next_hosts())
            workers = sum(host.workers for host in plan.hosts)
            log.info("world %d: %d hosts, %d workers", attempt, len(plan.hosts), workers)
        plan.logs.forget_tails()
        job = Job(plan, attempt, None if membership is None else membership.stop)
        try:
            values = job.run()
            break
        except StoppedError:
            continue
        except (AgentFailedError, InitializationError, RemoteError, WorkerFailedError) as error:
            if membership is not None and membership.explains(error, job.lost):
                continue
            if failures == most or not isinstance(error, (RemoteError, WorkerFailedError)):
                raise
            failures += 1
            why = (
                f"{type(error).__name__}: {safe_repr(error, str)}"
                if isinstance(error, RemoteError)
                else error
            )
            log.warning("restart %d of %d: %s", failures, most, why)
    return {host.name: values[host.first_rank : host.first_rank + host.workers] for host in plan.hosts}
