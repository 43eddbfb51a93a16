"""Hosts that come and go → the values of the last world that they formed.

This is the launcher's side. Each host has a :class:`~torchopt_dist.launch.job.Job` of its own, with one worker, in
which torch's elastic agent runs (``elastic_host.py``). The store of torch's rendezvous is here, so that it is not lost
with a host. What is left to do: take note of hosts that are lost, and start them again; say of a failure whether it is
a restart, the end, or follows from a host's loss; and take the values.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import logging
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousError

from torchopt_dist.errors import (
    AgentFailedError,
    CallTimeoutError,
    InitializationError,
    RemoteError,
    SerializationError,
    WorkerFailedError,
)
from torchopt_dist.launch.cluster import Host, Reach
from torchopt_dist.launch.elastic_host import (
    MARK,
    STORE_SECONDS,
    Done,
    Failed,
    Place,
    WorkerFailure,
    serve,
)
from torchopt_dist.launch.failures import EXIT_SECONDS, Failures, death, halt, revive
from torchopt_dist.launch.job import Job, Orders, Times
from torchopt_dist.launch.logs import WorkerLogs
from torchopt_dist.launch.machine import Machine, ThisMachine
from torchopt_dist.launch.meeting import LOOPBACK, Meeting
from torchopt_dist.launch.messages import pack, unpack

__all__ = ["reach_some", "run_elastic"]

log = logging.getLogger(__package__)

RETRY_SECONDS = 2.0
"""Until a host that was lost is tried again."""
GATHER_SECONDS = 30.0
"""For all hosts to come before the first world, if there are enough."""
ECHO_SECONDS, DEATH_SECONDS = 7.0, 1.0
"""How long a failure waits for the loss of a host, or another failure, that may be behind it: a broken connection for
as long as it takes to miss a silent host, and the end of a worker that said nothing."""
PATIENCE = 0.05
OWN_WORDS = 30


class Unreached(Machine):
    """A machine that cannot be reached at the start, and perhaps later.

    Args:
        name: its name.
        why: what was tried, and how it failed.
    """

    here = False
    cores = gpus = 0

    def __init__(self, name: str, why: str) -> None:
        self.name, self._why = name, why
        self.env, self.path = {}, []

    def request_agent(self, env: Mapping[str, str]) -> socket.socket:
        """Raises the reason."""
        raise InitializationError(self._why)

    def open_meeting(self) -> socket.socket:
        """Raises the reason."""
        raise InitializationError(self._why)

    def kill_agent(self, pid: int) -> None:
        """There is none."""

    def why_lost(self) -> str:
        """The reason."""
        return self._why


def reach_some(reach: Reach) -> Reach:
    """A way to reach machines that goes on without those that it does not reach.

    Args:
        reach: names of machines → these.
    """

    def reach_each(names: Sequence[str]) -> dict[str, Machine]:
        def one(name: str) -> Machine:
            try:
                return reach([name])[name]
            except InitializationError as error:
                return Unreached(name, str(error))

        with ThreadPoolExecutor(max(1, len(names))) as pool:
            return dict(zip(names, pool.map(one, names), strict=True))

    return reach_each


def run_elastic(
    *,
    hosts: list[Host],
    min_hosts: int,
    max_hosts: int,
    orders: Callable[[Machine], Orders],
    reach: Reach,
    task: int,
    port: int,
    logs: WorkerLogs,
    times: Times,
    run_id: str,
    max_restarts: int,
) -> dict[str, list[Any]]:
    """Run a task on hosts that may come and go.

    Args:
        hosts: where, and how many workers.
        min_hosts: with how many the work goes on.
        max_hosts: how many take part; others wait until one is lost.
        orders: machine → what its workers take over. The descriptor is closed here.
        reach: names of machines → these, for those that were lost.
        task: descriptor of the packed function and its arguments.
        port: where the store of the rendezvous listens; 0 means any free port.
        logs: where the workers' output goes.
        times: how long to wait; ``start`` is also how long there may be too few hosts.
        run_id: a name of this launch that no other has.
        max_restarts: how often workers may fail, on all hosts together. The loss of a host does not count.

    Returns:
        The values of the last world, by host in the order of their ranks.

    Raises:
        Exception: what a worker's function raised; also a :class:`~torchopt_dist.errors.RemoteError`.
        WorkerFailedError: a worker ended before its function returned.
        AgentFailedError: there were fewer than ``min_hosts`` for too long.
        CallTimeoutError: the functions have not returned in time.
        InitializationError: the port is taken, or it cannot be told how many workers a host has.
        SerializationError: a value cannot be read here.
    """
    for host in hosts:
        if host.workers < 1:
            raise InitializationError(
                f"`nproc_per_host` must be a number for hosts that cannot be reached at the start: "
                f"{host.machine.why_lost()}"
            )
    meeting = _Door(port) if _is_alone(hosts) else _Meeting(hosts, port)
    try:
        place = Place(
            name="",
            workers=0,
            address="",
            port=meeting.port,
            run_id=run_id,
            min_hosts=min_hosts,
            max_hosts=max_hosts,
            max_restarts=max_restarts,
            stop_timeout=times.stop,
            halted_timeout=times.halted,
            here=False,
        )
        packed = os.pread(task, os.fstat(task).st_size, 0)
        launch = _Launch(hosts, place, packed, orders, reach, logs, times, meeting)
        try:
            return launch.run()
        finally:
            launch.end()
    finally:
        meeting.close()


def _is_alone(hosts: list[Host]) -> bool:
    """Whether no other machine has been reached, but some may be later."""
    others = [host.machine for host in hosts if not host.machine.here]
    return bool(others) and all(machine.why_lost() is not None for machine in others)


class _Meeting:
    """The store of the rendezvous, in this process, at an address that all machines reach."""

    def __init__(self, hosts: list[Host], port: int) -> None:
        here = next((host.machine for host in hosts if host.machine.here), None) or ThisMachine()
        reached = [host.machine for host in hosts if host.machine.why_lost() is None]
        self._meeting = Meeting([here, *reached], port)
        self.port = self._meeting.port

    def address_for(self, machine: Machine) -> str:
        """Where a machine finds the store."""
        del machine
        return self._meeting.address

    def close(self) -> None:
        """End it."""
        self._meeting.close()


class _Door(_Meeting):
    """The same, at all addresses, since it is not known yet which of them other machines will reach."""

    def __init__(self, port: int) -> None:
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("", port))
            except OSError as error:
                raise InitializationError(
                    f"`master_port` must be free, or 0 for any free port, got {port}: {error.strerror}"
                ) from error
            listener.listen(1024)
            self.port = int(listener.getsockname()[1])
            self._store: dist.TCPStore | None = dist.TCPStore(
                LOOPBACK,
                self.port,
                None,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )

    def address_for(self, machine: Machine) -> str:
        """Where a machine finds the store."""
        return LOOPBACK if machine.here else machine.launcher_address

    def close(self) -> None:
        """End it."""
        self._store = None


class _Stopped(BaseException):
    """Raised in a host's job that is told to stop."""


class _HostJob(Job):
    """A job that another thread can stop.

    Args:
        stop: set when it is to end.
        options: those of a job.
    """

    def __init__(self, stop: threading.Event, **options: Any) -> None:
        super().__init__(**options)
        self._stop = stop

    def _patience(self, now: float, returned_at: float | None) -> float | None:
        if self._stop.is_set():
            raise _Stopped
        patience = super()._patience(now, returned_at)
        return PATIENCE if patience is None else min(patience, PATIENCE)


@dataclass(eq=False)
class _Member:
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


@dataclass
class _Trouble:
    """The failures in one world.

    Attributes:
        until: when it is to be judged, if the loss of a host does not explain it before.
        text: the likeliest cause.
        hosts: on which hosts.
        verdict: ``"again"`` or ``"end"``.
    """

    until: float
    text: str
    hosts: set[str] = field(default_factory=set)
    verdict: str = ""


class _Launch:
    """One elastic launch."""

    def __init__(
        self,
        hosts: list[Host],
        place: Place,
        task: bytes,
        orders: Callable[[Machine], Orders],
        reach: Reach,
        logs: WorkerLogs,
        times: Times,
        meeting: _Meeting,
    ) -> None:
        self._members = {host.name: _Member(host) for host in hosts}
        self._place, self._task, self._orders, self._reach = place, task, orders, reach
        self._logs, self._times = logs, times
        self._meeting = meeting
        self._store: dist.TCPStore | None = dist.TCPStore(
            meeting.address_for(ThisMachine()),
            meeting.port,
            None,
            wait_for_workers=False,
            timeout=timedelta(seconds=STORE_SECONDS),
        )
        self._events: queue.SimpleQueue[tuple[_Member, object]] = queue.SimpleQueue()
        self._started = time.monotonic()
        self._too_few_since: float | None = self._started
        self._gathering = True
        self._restarts = 0
        self._world = -1
        self._losses: set[int] = set()
        """Worlds of which a host was missed."""
        self._incomplete: set[int] = set()
        """Those of which a host was lost for certain, and its values with it."""
        self._troubles: dict[int, _Trouble] = {}
        self._ends: dict[str, Failed] = {}
        self._ending: _Trouble | None = None

    def run(self) -> dict[str, list[Any]]:
        """The values of the last world."""
        for member in self._members.values():
            self._start(member)
        while True:
            with contextlib.suppress(queue.Empty):
                while True:
                    self._take(*self._events.get(timeout=PATIENCE))
                    values = self._values()
                    if values is not None:
                        return values
            now = time.monotonic()
            self._gather(now)
            self._judge(now)
            self._raise_if_over(now)
            self._raise_if_too_few(now)
            self._bring_back(now)

    def end(self) -> None:
        """Stop all hosts."""
        for member in self._members.values():
            if member.stop is not None:
                member.stop.set()
        for member in self._members.values():
            if member.thread is not None and not member.reaching:
                member.thread.join()
        self._store = None

    def _start(self, member: _Member) -> None:
        member.here, member.world, member.done, member.retry_at = False, None, None, None
        member.stop = threading.Event()
        member.running = True
        member.thread = threading.Thread(target=self._run_job, args=(member, member.stop), daemon=True)
        member.thread.start()

    def _run_job(self, member: _Member, stop: threading.Event) -> None:
        """In a thread: reach a host, and wait for its part of the launch to end."""
        ending: object
        try:
            (ending,) = self._job(member, stop)
        except BaseException as error:
            ending = error
            member.reaching = False
        self._events.put((member, ending))

    def _job(self, member: _Member, stop: threading.Event) -> list[Any]:
        host = member.host
        if host.machine.why_lost() is not None:
            member.reaching = True
            machine = self._reach([host.machine.name])[host.machine.name]
            host = member.host = dataclasses.replace(host, machine=machine)
            member.reaching = False
            if stop.is_set():
                raise _Stopped
        machine = host.machine
        if isinstance(self._meeting, _Door) and not machine.here and self._store is not None:
            self._store.set("here", machine.launcher_address)
        place = dataclasses.replace(
            self._place,
            name=host.name,
            workers=host.workers,
            address=self._meeting.address_for(machine),
            here=machine.here,
        )
        with contextlib.ExitStack() as files:
            task = pack((serve, (place, self._task), {}))
            files.callback(os.close, task)
            orders = self._orders(machine)
            files.callback(os.close, orders.header)
            job = _HostJob(
                stop,
                hosts=[dataclasses.replace(host, workers=1, first_rank=0)],
                orders={machine: orders},
                task=task,
                port=0,
                logs=_HostLogs(self._logs, lambda news: self._events.put((member, news))),
                times=dataclasses.replace(self._times, whole=None),
                run_id=place.run_id,
                restarts=0,
                max_restarts=0,
            )
            return job.run()

    def _take(self, member: _Member, event: object) -> None:
        if isinstance(event, dict):
            self._take_news(member, event)
            return
        member.running = member.here = False
        if isinstance(event, Done) and event.world in self._incomplete:
            self._start(member)
        elif isinstance(event, Done):
            member.done = event
        elif isinstance(event, Failed):
            self._ends[member.host.name] = event
        elif _is_loss(event):
            self._lose(member, str(event))
        elif isinstance(event, BaseException):
            raise event

    def _take_news(self, member: _Member, news: dict[str, Any]) -> None:
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
            self._losses.add(world)
        elif news["news"] == "failed":
            self._take_failure(member, news)

    def _take_failure(self, member: _Member, news: dict[str, Any]) -> None:
        now = time.monotonic()
        wait = ECHO_SECONDS if news["echo"] and news["raised"] else 0.0 if news["raised"] else DEATH_SECONDS
        text = f"{news['text']} (on {member.host.name})"
        trouble = self._troubles.setdefault(news["world"], _Trouble(now + wait, text))
        trouble.hosts.add(member.host.name)
        if not trouble.verdict and now + wait < trouble.until:
            trouble.until, trouble.text = now + wait, text

    def _lose(self, member: _Member, why: str) -> None:
        first = not member.lost or member.world is not None
        member.lost, member.retry_at = why, time.monotonic() + RETRY_SECONDS
        left = ", ".join(name for name, other in self._members.items() if other.here) or "none"
        level = logging.WARNING if first else logging.DEBUG
        log.log(level, "%s is lost; hosts that are left: %s; the reason: %s", member.host.name, left, why)
        if member.world is None:
            return
        self._losses.add(member.world)
        self._incomplete.add(member.world)
        for other in self._members.values():
            if other.done is not None and other.done.world == member.world:
                self._start(other)  # its values are nothing without the lost ones

    def _gather(self, now: float) -> None:
        """Let the hosts begin when all have come, or enough have waited for the others."""
        if not self._gathering:
            return
        here = sum(member.here for member in self._members.values())
        settled = all(member.here or member.lost for member in self._members.values())
        late = now > self._started + GATHER_SECONDS
        if here >= self._place.min_hosts and (settled or late):
            self._gathering = False
            assert self._store is not None
            self._store.set("go", "")

    def _judge(self, now: float) -> None:
        for world, trouble in self._troubles.items():
            if trouble.verdict:
                continue
            if world in self._losses:
                trouble.verdict = "again"
            elif now < trouble.until:
                continue
            elif self._restarts < self._place.max_restarts:
                self._restarts += 1
                trouble.verdict = "again"
                log.warning("restart %d of %d: %s", self._restarts, self._place.max_restarts, trouble.text)
            else:
                trouble.verdict = "end"
                trouble.until = now + self._times.stop + ECHO_SECONDS
                self._ending = trouble
            assert self._store is not None
            self._store.set(f"verdict/{world}", trouble.verdict)

    def _raise_if_over(self, now: float) -> None:
        whole = self._times.whole
        if whole is not None and now > self._started + whole:
            waiting = [member.host.name for member in self._members.values() if member.done is None]
            raise CallTimeoutError(f"{', '.join(waiting)} did not return within `timeout`, {whole:g} s")
        ending = self._ending
        if ending is None or (now < ending.until and not ending.hosts <= self._ends.keys()):
            return
        if not self._ends:
            raise AgentFailedError(f"workers failed, and the hosts that knew how were lost: {ending.text}")
        failures = Failures()
        for name, failed in self._ends.items():
            for failure in failed.failures:
                failures.add(*self._error(name, failure))
        failures.raise_cause(all_known=True)

    def _error(self, name: str, failure: WorkerFailure) -> tuple[Exception, float | None]:
        if failure.told is not None:
            return revive(*failure.told, f"rank {failure.rank} on {name}"), None
        log_lines = self._logs.tail(failure.rank)
        if failure.halted:
            return halt(failure.rank, name, signal.SIGSTOP, failure.halted, log_lines), None
        wait = EXIT_SECONDS if failure.status >= 0 else 0.0
        return death(failure.rank, name, failure.status, log_lines, asked=failure.asked), wait

    def _raise_if_too_few(self, now: float) -> None:
        taking_part = [member for member in self._members.values() if member.here or member.done is not None]
        if len(taking_part) >= self._place.min_hosts or self._ending is not None:
            self._too_few_since = None
            return
        self._too_few_since = self._too_few_since or now
        if now > self._too_few_since + self._times.start:
            reasons = [
                f"{name}: {member.lost or 'it has not come'}"
                for name, member in self._members.items()
                if member not in taking_part
            ]
            raise AgentFailedError(
                f"there are {len(taking_part)} hosts, and at least {self._place.min_hosts} are needed "
                f"(`min_hosts`), since {self._times.start:g} s (`start_timeout`):\n" + "\n".join(reasons)
            )

    def _bring_back(self, now: float) -> None:
        there = sum(member.running for member in self._members.values())
        for member in self._members.values():
            if (
                member.retry_at is not None
                and now > member.retry_at
                and there < self._place.max_hosts
                and self._ending is None
            ):
                there += 1
                self._start(member)

    def _values(self) -> dict[str, list[Any]] | None:
        done = [(member.done, name) for name, member in self._members.items() if member.done is not None]
        worlds = collections.Counter(part.world for part, _ in done)
        for world, number in worlds.items():
            parts = sorted(
                ((part.place, name, part) for part, name in done if part.world == world), key=lambda p: p[:2]
            )
            if number == parts[0][2].size:
                return {name: [_value(data, name) for data in part.values] for _, name, part in parts}
        return None


def _is_loss(event: object) -> bool:
    """Whether a job's end means that its host is lost, and not that the launch is wrong."""
    if isinstance(event, RemoteError):
        return isinstance(event, (ConnectionError, TimeoutError, dist.DistError, RendezvousError))
    return isinstance(event, (AgentFailedError, WorkerFailedError, InitializationError, OSError))


def _value(data: bytes, name: str) -> Any:
    descriptor = os.memfd_create("todist", os.MFD_CLOEXEC)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)
    try:
        return unpack(descriptor)
    except Exception as error:
        raise SerializationError(
            f"what {name} returned cannot be read by the launcher: {type(error).__name__}: {error}"
        ) from error


class _HostLogs(WorkerLogs):
    """A host's lines → its workers' lines, and its news."""

    def __init__(self, logs: WorkerLogs, tell: Any) -> None:
        self._logs, self._tell = logs, tell
        self._own: collections.deque[str] = collections.deque(maxlen=OWN_WORDS)

    def write(self, line: str, rank: int, local_rank: int, host: str, stream: str) -> None:
        """Hand on one line."""
        if not line.startswith(MARK):
            self._own.append(line)
            log.debug("%s: %s", host, line)
            return
        kind, text = line[1], line[2:]
        if kind == "!":
            self._tell(json.loads(text))
            return
        of_rank, of_local_rank, said = text.split(" ", 2)
        stream = "stdout" if kind == "o" else "stderr"
        self._logs.write(said, int(of_rank), int(of_local_rank), host, stream)

    def tail(self, rank: int) -> tuple[str, ...]:
        """The last words of the host itself."""
        return tuple(self._own)
