"""Hosts → the values of the last world that they formed, or the error that ended the launch: the launcher's loop."""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import queue
import time
from typing import Any

from torchopt_dist.errors import AgentFailedError, CallTimeoutError, InitializationError
from torchopt_dist.launch.cluster import Reach
from torchopt_dist.launch.duties import read_value
from torchopt_dist.launch.elastic.host_job import PATIENCE, HandlerError, HostJobs, is_loss
from torchopt_dist.launch.elastic.members import Member, Members
from torchopt_dist.launch.elastic.records import GO, Done, Failed, Place, new_mark
from torchopt_dist.launch.elastic.store import open_store
from torchopt_dist.launch.elastic.verdict import Verdicts
from torchopt_dist.launch.plan import Plan

__all__ = ["run_elastic"]

log = logging.getLogger("torchopt_dist.launch")

GATHER_SECONDS = 30.0
"""For all hosts to come before the first world, if there are enough."""


def run_elastic(plan: Plan, min_hosts: int, max_hosts: int, reach: Reach) -> dict[str, list[Any]]:
    """Run a task on hosts that may come and go.

    Args:
        plan: what is to be done. ``times.start`` is also how long there may be too few hosts; ``max_restarts`` is for
            all hosts together, and the loss of a host does not count.
        min_hosts: with how many the work goes on.
        max_hosts: how many take part; others wait until one is lost.
        reach: names of machines → these, for those that were lost.

    Returns:
        The values of the last world, by host in the order of their ranks.

    Raises:
        Exception: what a worker's function raised; also a :class:`~torchopt_dist.errors.RemoteError`.
        WorkerFailedError: a worker ended before its function returned.
        AgentFailedError: there were fewer than ``min_hosts`` for too long.
        CallTimeoutError: the functions have not returned in time.
        InitializationError: workers have not started in time, the port is taken, or it cannot be told how many workers
            a host has.
        SerializationError: a value cannot be read here.
    """
    for host in plan.hosts:
        if host.workers < 1:
            raise InitializationError(
                f"`nproc_per_host` must be a number for hosts that cannot be reached at the start: "
                f"{host.machine.why_lost()}"
            )
    store = open_store(plan.hosts, plan.port)
    try:
        place = Place(
            name="",
            workers=0,
            address="",
            port=store.port,
            run_id=plan.run_id,
            min_hosts=min_hosts,
            max_hosts=max_hosts,
            max_restarts=plan.max_restarts,
            mark=new_mark(),
            start_timeout=plan.times.start,
            exit_timeout=plan.times.exit,
            stop_timeout=plan.times.stop,
            agent_timeout=plan.times.agent,
            halted_timeout=plan.times.halted,
            here=False,
        )
        packed = os.pread(plan.task, os.fstat(plan.task).st_size, 0)
        store.connect()
        launch = _Launch(HostJobs(plan, place, packed, store), reach)
        try:
            return launch.run()
        finally:
            launch.end()
    finally:
        store.close()


class _Launch:
    """One elastic launch.

    Args:
        jobs: what runs on the hosts.
        reach: names of machines → these, for those that were lost.
    """

    def __init__(self, jobs: HostJobs, reach: Reach) -> None:
        self._place, self._store = jobs.place, jobs.store
        self._logs, self._times = jobs.plan.logs, jobs.plan.times
        self._members = Members(jobs.plan.hosts, jobs.place.max_hosts, jobs, reach)
        self._verdicts = Verdicts(jobs.store, jobs.plan)
        self._started = time.monotonic()
        self._too_few_since: float | None = self._started
        self._gathering = True
        self._world = -1

    def run(self) -> dict[str, list[Any]]:
        """The values of the last world."""
        for member in self._members:
            self._members.start(member)
        while True:
            with contextlib.suppress(queue.Empty):
                while True:
                    self._take(*self._members.events.get(timeout=PATIENCE))
                    values = self._values()
                    if values is not None:
                        return values
            now = time.monotonic()
            self._gather(now)
            self._verdicts.judge(now)
            self._raise_if_late(now)
            self._verdicts.raise_if_end(now)
            self._raise_if_too_few(now)
            if not self._verdicts.is_end:
                self._members.bring_back(now)

    def end(self) -> None:
        """Stop all hosts."""
        self._members.end()

    def _take(self, member: Member, event: object) -> None:
        if isinstance(event, dict):
            self._take_news(member, event)
            return
        member.running = member.here = False
        if isinstance(event, Done):
            self._members.complete(member, event)
        elif isinstance(event, Failed):
            self._verdicts.take_end(member.name, event)
        elif is_loss(event):
            if member.world is not None:
                self._verdicts.take_loss(member.world)
            self._members.lose(member, str(event))
        elif isinstance(event, BaseException):
            raise event.error if isinstance(event, HandlerError) else event

    def _take_news(self, member: Member, news: dict[str, Any]) -> None:
        world = news.get("world", -1)
        if news["news"] == "here":
            member.here = True
        elif news["news"] == "world":
            member.world = world
            if world > self._world:
                self._world = world
                self._logs.forget_tails()
                log.info("world %d: %d hosts, %d workers", world, news["size"], news["workers"])
        elif news["news"] == "missing":
            self._verdicts.take_loss(world)
        elif news["news"] == "failed":
            self._verdicts.take_failure(member.name, news)
        elif news["news"] == "late":
            late = ", ".join(f"rank {rank} on {member.name}" for rank in news["ranks"])
            raise InitializationError(f"{late} did not start within `start_timeout`, {self._times.start:g} s")
        elif news["news"] == "bad exit":
            log.warning("rank %d on %s returned its value, but %s", news["rank"], member.name, news["how"])

    def _gather(self, now: float) -> None:
        """Let the hosts begin when all have come, or enough have waited for the others."""
        if not self._gathering:
            return
        here = sum(member.here for member in self._members)
        settled = all(member.here or member.lost for member in self._members)
        late = now > self._started + GATHER_SECONDS
        if here >= self._place.min_hosts and (settled or late):
            self._gathering = False
            self._store.set(GO, "")

    def _raise_if_late(self, now: float) -> None:
        whole = self._times.whole
        if whole is not None and now > self._times.begun + whole:
            waiting = [member.name for member in self._members if member.done is None]
            raise CallTimeoutError(f"{', '.join(waiting)} did not return within `timeout`, {whole:g} s")

    def _raise_if_too_few(self, now: float) -> None:
        taking_part = [member for member in self._members if member.here or member.done is not None]
        if len(taking_part) >= self._place.min_hosts or self._verdicts.is_end:
            self._too_few_since = None
            return
        self._too_few_since = self._too_few_since or now
        if now > self._too_few_since + self._times.start:
            reasons = [
                f"{member.name}: {member.lost or 'it has not come'}"
                for member in self._members
                if member not in taking_part
            ]
            raise AgentFailedError(
                f"there are {len(taking_part)} hosts, and at least {self._place.min_hosts} are needed "
                f"(`min_hosts`), since {self._times.start:g} s (`start_timeout`):\n" + "\n".join(reasons)
            )

    def _values(self) -> dict[str, list[Any]] | None:
        """Those of a world of which all hosts have done their part, if there is one."""
        done = [(member.done, member.name) for member in self._members if member.done is not None]
        worlds = collections.Counter(part.world for part, _ in done)
        for world, number in worlds.items():
            parts = sorted(
                ((part.place, name, part) for part, name in done if part.world == world), key=lambda p: p[:2]
            )
            if number == parts[0][2].size:
                return {name: [_value(data, name) for data in part.values] for _, name, part in parts}
        return None


def _value(data: bytes, name: str) -> Any:
    descriptor = os.memfd_create("todist", os.MFD_CLOEXEC)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)
    return read_value(descriptor, name)
