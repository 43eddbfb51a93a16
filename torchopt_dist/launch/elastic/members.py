"""Hosts → what is known of each: they are started, lost, and brought back, and tell what happens to them."""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from torchopt_dist.launch.cluster import Host, Reach
from torchopt_dist.launch.elastic.host_job import HostJobs, Stopped
from torchopt_dist.launch.elastic.records import Done

__all__ = ["Member", "Members"]

log = logging.getLogger("torchopt_dist.launch")

RETRY_SECONDS = 2.0
"""Until a host that was lost is tried again."""


@dataclass(eq=False)
class Member:
    """What is known of a host.

    Attributes:
        host: the host.
        running: whether it has been started, and has not ended.
        thread: where that is waited for.
        reaching: whether it is just tried to reach it.
        stop: set for it to end.
        here: whether it has reported since.
        world: the last world in which it was.
        lost: why it was lost, the last time.
        retry_at: when it is to be tried again.
        done: its part of a world that has returned.
    """

    host: Host
    running: bool = False
    reaching: bool = False
    thread: threading.Thread | None = None
    stop: threading.Event | None = None
    here: bool = False
    world: int | None = None
    lost: str = ""
    retry_at: float | None = None
    done: Done | None = None

    @property
    def name(self) -> str:
        """The host's."""
        return self.host.name


class Members:
    """All hosts of a launch.

    Args:
        hosts: that may take part.
        max_hosts: how many do; others wait until one is lost.
        jobs: what runs on them.
        reach: names of machines → these, for those that were lost.

    Attributes:
        events: what their threads tell: news, which are a ``dict``, and how a job has ended.
    """

    def __init__(self, hosts: list[Host], max_hosts: int, jobs: HostJobs, reach: Reach) -> None:
        self._members = [Member(host) for host in hosts]
        self._max_hosts, self._jobs, self._reach = max_hosts, jobs, reach
        self._incomplete: set[int] = set()
        """Worlds of which a host was lost for certain, and its values with it."""
        self.events: queue.SimpleQueue[tuple[Member, object]] = queue.SimpleQueue()

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members)

    def start(self, member: Member) -> None:
        """Start a host, in a thread."""
        member.here, member.world, member.done, member.retry_at = False, None, None, None
        member.stop = threading.Event()
        member.running = True
        member.thread = threading.Thread(target=self._run_job, args=(member, member.stop), daemon=True)
        member.thread.start()

    def _run_job(self, member: Member, stop: threading.Event) -> None:
        """In a thread: reach a host, and wait for its part of the launch to end."""
        ending: object
        try:
            self._reach_again(member, stop)
            ending = self._jobs.run(member.host, stop, lambda news: self.events.put((member, news)))
        except BaseException as error:
            ending = error
            member.reaching = False
        self.events.put((member, ending))

    def _reach_again(self, member: Member, stop: threading.Event) -> None:
        name = member.host.machine.name
        if member.host.machine.why_lost() is None:
            return
        member.reaching = True
        member.host = dataclasses.replace(member.host, machine=self._reach([name])[name])
        member.reaching = False
        if stop.is_set():
            raise Stopped

    def complete(self, member: Member, done: Done) -> None:
        """A host has done its part of a world, which is nothing if another's part of that is lost."""
        if done.world in self._incomplete:
            self.start(member)
        else:
            member.done = done

    def lose(self, member: Member, why: str) -> None:
        """Take note of a loss, and start those again whose values are nothing without the lost ones."""
        first = not member.lost or member.world is not None
        member.lost, member.retry_at = why, time.monotonic() + RETRY_SECONDS
        left = ", ".join(other.name for other in self if other.here) or "none"
        level = logging.WARNING if first else logging.DEBUG
        log.log(level, "%s is lost; hosts that are left: %s; the reason: %s", member.name, left, why)
        if member.world is None:
            return
        self._incomplete.add(member.world)
        for other in self:
            if other.done is not None and other.done.world == member.world:
                self.start(other)

    def bring_back(self, now: float) -> None:
        """Start those again that were lost, while fewer than ``max_hosts`` run."""
        there = sum(member.running for member in self)
        for member in self:
            if member.retry_at is not None and now > member.retry_at and there < self._max_hosts:
                there += 1
                self.start(member)

    def end(self) -> None:
        """Stop all hosts."""
        for member in self:
            if member.stop is not None:
                member.stop.set()
        for member in self:
            if member.thread is not None and not member.reaching:
                member.thread.join()
