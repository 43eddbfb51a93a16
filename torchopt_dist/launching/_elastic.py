"""A plan → the values of the first attempt that succeeds: others follow failures, and hosts that come or go.

In an elastic launch a :class:`Membership` says which hosts take part in each attempt. Meanwhile lost hosts are reached
again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import math
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchopt_dist.errors import (
    AgentFailedError,
    CallTimeoutError,
    InitializationError,
    RemoteError,
    WorkerFailedError,
)
from torchopt_dist.launching._attempt import Attempt, StoppedError, may_be_an_echo
from torchopt_dist.launching._cluster import Host, Reach
from torchopt_dist.launching._hosts import HostState, Plan, Stateful
from torchopt_dist.launching._machines import Machine
from torchopt_dist.launching._messages import ToAgent, frame
from torchopt_dist.launching._processes import LONGEST_WAIT
from torchopt_dist.launching.result import LaunchResult
from torchopt_dist.pickling.serialized_exception import safe_repr

__all__ = ["Membership", "UnreachedMachine", "run_attempts"]

log = logging.getLogger(__package__)

RETRY_SECONDS, LONGEST_RETRY_SECONDS = 2.0, 60.0
"""Until a lost host is tried again. The first pause doubles with each loss of the same host, up to the longer time."""
GATHER_SECONDS = 1.0
"""For further hosts to come back, before the attempt that runs is stopped for those that have."""
NOTICE_SECONDS = 1.0
"""For the loss of another machine to become known, when a worker has failed in a way that may follow from it."""
POLL_SECONDS = 0.05


def run_attempts(plan: Plan, membership: Membership | None = None) -> LaunchResult[Any]:
    """Run a task until it succeeds, or workers have failed once too often.

    Args:
        plan: the launch. There is another attempt when a worker has raised or died, up to ``max_restarts`` times.
        membership: which hosts take part in each attempt. There is another attempt when hosts were lost or have come
            back, and these attempts do not count. ``None``: the hosts of the plan, and the loss of one is an error.

    Returns:
        The values, by host, and the ranks that were lost.

    Raises:
        Exception: as :meth:`~torchopt_dist.launching._attempt.Attempt.run` and :meth:`Membership.next_hosts`.
    """
    failures, most = 0, plan.options.max_restarts
    for restarts in itertools.count():
        hosts = plan.hosts if membership is None else membership.next_hosts()
        plan = dataclasses.replace(plan, hosts=hosts, restarts=restarts)
        if membership is not None:
            workers = sum(host.workers for host in plan.hosts)
            log.info("world %d: %d hosts, %d workers", restarts, len(plan.hosts), workers)
        plan.logs.forget_tails()
        attempt = Attempt(plan, None if membership is None else membership.stop)
        try:
            values = attempt.run()
            break
        except StoppedError:
            continue
        except (AgentFailedError, InitializationError, RemoteError, WorkerFailedError) as error:
            if membership is not None and membership.explains(error, attempt.lost):
                continue
            if failures == most or not isinstance(error, (RemoteError, WorkerFailedError)):
                raise
            failures += 1
            kind = f"{type(error).__name__}: " if isinstance(error, RemoteError) else ""
            log.warning("restart %d of %d: %s%s", failures, most, kind, safe_repr(error, str))
    by_host = {host.name: values[host.first_rank : host.first_rank + host.workers] for host in plan.hosts}
    return LaunchResult(by_host, attempt.lost_workers, dict(attempt.replaced))


class UnreachedMachine(Machine):
    """A machine that could not be reached at the start, and perhaps can be later.

    Args:
        name: its name.
        why: what was tried, and how it failed.
    """

    here = False
    cores = gpus = 0

    def __init__(self, name: str, why: str) -> None:
        self.name, self._why = name, why
        self.env, self.path = {}, []

    def connect(self, env: Mapping[str, str]) -> socket.socket:
        """Raise the reason."""
        raise InitializationError(self._why)

    def kill(self, pid: int) -> None:
        """Do nothing: there is no agent."""

    def why_lost(self, seconds: float = 0.0) -> str:
        """The reason."""
        return self._why


@dataclass(eq=False)
class _Member(Stateful[HostState]):
    """What is known of a host.

    Attributes:
        host: the host.
        state: whether it takes part.
        why: the reason for which it was lost.
        losses: how often it was lost.
        waiting: the thread that is to reach the host again, while it waits to try.
    """

    host: Host
    state: HostState = HostState.SPARE
    why: str | None = None
    losses: int = 0
    waiting: threading.Thread | None = None


class Membership:
    """The hosts of one elastic launch, until :meth:`close`.

    Args:
        plan: the launch, and all hosts that may take part. Its options ``min_hosts`` and ``max_hosts`` say how many
            hosts an attempt needs, and how many take part at most; the others are spare.
        reach: names of machines → the machines, for those that were lost.

    Raises:
        InitializationError: the number of workers of a host that has not been reached is not known.
        ValueError: fewer hosts may take part than are needed.

    Attributes:
        stop: a socket that can be read when hosts have come back for which there is room.
    """

    def __init__(self, plan: Plan, reach: Reach) -> None:
        self._max_hosts = min(plan.options.max_hosts or len(plan.hosts), len(plan.hosts))
        self._min_hosts = plan.options.min_hosts or self._max_hosts
        if self._min_hosts > self._max_hosts:
            raise ValueError(
                f"`min_hosts` must be at most the number of hosts that take part, {self._max_hosts}, "
                f"got {self._min_hosts}"
            )
        for host in plan.hosts:
            if host.workers < 1:
                raise InitializationError(
                    "`nproc_per_host` must be a number for hosts that cannot be reached at the start: "
                    f"{host.machine.why_lost()}"
                )
        self._plan, self._reach = plan, reach
        self._members = [_Member(host) for host in plan.hosts]
        self._parts: list[_Member] = []
        """Those that took part when the last attempt began."""
        self._changed = threading.Condition()
        """Held by whoever reads or changes the members; notified when a host has come, and at the end."""
        self._closed = False
        self.stop, self._stopper = socket.socketpair()
        self.stop.setblocking(False)

    def close(self) -> None:
        """Let the threads that reach hosts end, each after its present try."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self.stop.close()
            self._stopper.close()
            threads = [member.waiting for member in self._members if member.waiting is not None]
        for thread in threads:
            thread.join()

    def next_hosts(self) -> list[Host]:
        """The hosts of the next attempt, with ranks in their order; wait until there are enough.

        Hosts of the last attempt stay, if they are not lost; spare hosts take the free places, in the order of
        ``hosts``.

        Raises:
            AgentFailedError: there have been too few hosts for too long.
            CallTimeoutError: the time of the whole launch has passed.
        """
        with self._changed:
            too_few_since = time.monotonic()
            while True:
                self._note_losses({})
                there = self._there()
                if len(there) >= self._min_hosts:
                    break
                self._wait_for_hosts(len(there), too_few_since)
            # The sort keeps the order of equals.
            for index, member in enumerate(sorted(there, key=lambda each: each.state is HostState.SPARE)):
                member.enter(HostState.WORKING if index < self._max_hosts else HostState.SPARE)
            with contextlib.suppress(BlockingIOError):  # hosts that the attempt was stopped for take part
                self.stop.recv(1 << 10)
            self._parts = [member for member in self._members if member.state is HostState.WORKING]
            hosts: list[Host] = []
            for member in self._parts:
                rank = hosts[-1].first_rank + hosts[-1].workers if hosts else 0
                hosts.append(dataclasses.replace(member.host, first_rank=rank))
            return hosts

    def _there(self) -> list[_Member]:
        return [member for member in self._members if member.state is not HostState.LOST]

    def explains(self, error: Exception, lost: Mapping[str, str]) -> bool:
        """Whether an attempt has failed because hosts were lost.

        Args:
            error: the error of the attempt.
            lost: the names of the hosts that the attempt has lost → the reasons.
        """
        kinds = (AgentFailedError, InitializationError, WorkerFailedError)
        may_follow = isinstance(error, kinds) or may_be_an_echo(error)
        until = time.monotonic() + NOTICE_SECONDS
        while True:
            with self._changed:
                self._note_losses(lost)
            if not may_follow or any(member.state is not HostState.WORKING for member in self._parts):
                return may_follow
            if all(member.host.machine.here for member in self._parts) or time.monotonic() > until:
                return False
            time.sleep(POLL_SECONDS)

    def _note_losses(self, lost: Mapping[str, str]) -> None:
        """Record which hosts are lost, and start a thread for each to reach it again."""
        before = self._there()
        for member in before:
            member.why = lost.get(member.host.name) or member.host.machine.why_lost()
            if member.why is not None:
                member.enter(HostState.LOST)
        left = ", ".join(member.host.name for member in self._there()) or "none"
        for member in before:
            if member.state is HostState.LOST:
                member.losses += 1
                name = member.host.name
                log.warning("%s is lost; hosts that are left: %s; the reason: %s", name, left, member.why)
                threading.Thread(
                    target=self._bring_back, args=(member,), name=f"todist {name}", daemon=True
                ).start()

    def _wait_for_hosts(self, number: int, since: float) -> None:
        """Wait until a host has come, or raise if the time for that is up."""
        options, now = self._plan.options, time.monotonic()
        until = since + options.start_timeout
        end = math.inf if options.timeout is None else self._plan.begun + options.timeout
        if now < min(until, end):
            self._changed.wait(min(until, end, now + LONGEST_WAIT) - now)
            return
        few = f"there are {number} hosts, and at least {self._min_hosts} are needed (`min_hosts`), "
        why = "".join(f"\n{member.host.name}: {member.why}" for member in self._members if member.why)
        if now < until:
            raise CallTimeoutError(f"{few}and `timeout`, {options.timeout:g} s, has passed:{why}")
        raise AgentFailedError(f"{few}since {options.start_timeout:g} s (`start_timeout`):{why}")

    def _bring_back(self, member: _Member) -> None:
        """Reach a lost host, in a thread, and stop the running attempt if there is room for the host."""
        machine = None
        pause = min(RETRY_SECONDS * 2.0 ** (member.losses - 1), LONGEST_RETRY_SECONDS)
        while machine is None:
            with self._changed:
                member.waiting = threading.current_thread()
                if self._changed.wait_for(lambda: self._closed, pause):
                    return
                member.waiting = None
            pause = RETRY_SECONDS
            try:
                machine = self._reach_again(member.host)
            except Exception as error:
                log.debug("%s cannot be reached: %s", member.host.name, error)
                member.why = str(error) or type(error).__name__
        with self._changed:
            member.waiting = threading.current_thread()
            member.host, member.why = dataclasses.replace(member.host, machine=machine), None
            member.enter(HostState.SPARE)
            self._changed.notify_all()
            if self._changed.wait_for(
                lambda: self._closed or member.state is HostState.WORKING, GATHER_SECONDS
            ):
                return
            working = sum(other.state is HostState.WORKING for other in self._members)
            if member.state is HostState.SPARE and working < self._max_hosts:
                log.info("%s is back", member.host.name)
                self._stopper.send(b"+")

    def _reach_again(self, host: Host) -> Machine:
        """The machine of a host that was lost.

        Raises:
            InitializationError: the machine cannot be reached.
            AgentFailedError: the machine does not start an agent.
        """
        machine, seconds = host.machine, min(self._plan.liveness.patience, LONGEST_WAIT)
        if machine.why_lost() is not None:
            return self._reach([machine.name])[machine.name]
        env = self._plan.settings_on(machine).env
        with machine.connect(env) as agent, contextlib.suppress(ConnectionError):
            agent.settimeout(seconds)
            try:
                agent.sendall(b"".join(frame(ToAgent.stop, 0.0)))
                while agent.recv(1 << 12):
                    pass
            except TimeoutError:
                raise AgentFailedError(f"an agent on {host.name} did not answer for {seconds:g} s") from None
        if (lost := machine.why_lost()) is not None:
            raise AgentFailedError(lost)
        return machine
