"""One host of an elastic launch → torch's own elastic agent, which starts workers again when the world changes.

This runs in a worker of ours, one a host. Torch's rendezvous says who takes part, and torch's agent starts and stops
the workers. Added are: one store a world, so that nothing of an earlier one is read; a host that has gone is noticed,
not only one that comes; and the launcher is asked whether a failure is a restart, since it alone knows of all hosts.

What a host tells the launcher are lines of its standard output that start with ``MARK``; the launcher answers in the
store of the rendezvous.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import math
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, Self

import cloudpickle
import psutil
import setproctitle
import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousInfo
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
)

from torchopt_dist.errors import SerializationError
from torchopt_dist.failure import RemoteFailure
from torchopt_dist.launch.agent import PR_SET_PDEATHSIG, libc
from torchopt_dist.launch.failures import may_be_an_echo
from torchopt_dist.launch.logs import LineReader
from torchopt_dist.launch.messages import unpack
from torchopt_dist.network import local_address

__all__ = ["MARK", "STORE_SECONDS", "Done", "Failed", "Place", "WorkerFailure", "serve"]

MARK = "\x1e"
"""Starts a line that is not the host's own word. It is followed by ``o`` or ``e``, a worker's ranks and its line, or by
``!`` and news."""
HEARTBEAT_SECONDS, HEARTBEATS = 1, 5
"""Of a host, and how many of them may be missed."""
LAST_CALL_SECONDS = 2
"""For further hosts to come when there are enough."""
STORE_SECONDS = 20.0
"""For the hosts of a world to tell each other their ranks."""
MONITOR_SECONDS = 0.1
LONGEST_TEXT, LONGEST_PART = 1000, 1 << 19
"""Characters of a failure in a log, and of a worker's line in one of ours."""
FOREVER = timedelta(days=365)


@dataclass(frozen=True)
class Place:
    """What a host is told.

    Attributes:
        name: its name.
        workers: how many it has.
        address: where the launcher's store is.
        port: likewise.
        run_id: a name of this launch that no other has.
        min_hosts: how many make a world.
        max_hosts: how many can take part.
        max_restarts: how often workers may fail.
        stop_timeout: seconds between SIGTERM and SIGKILL.
        here: whether it is the launcher's machine.
        halted_timeout: seconds for a worker that is stopped by a signal to go on; ``None`` means as long as it takes.
    """

    name: str
    workers: int
    address: str
    port: int
    run_id: str
    min_hosts: int
    max_hosts: int
    max_restarts: int
    stop_timeout: float
    halted_timeout: float | None
    here: bool


@dataclass(frozen=True)
class WorkerFailure:
    """How a worker failed.

    Attributes:
        rank: its rank in that world.
        status: its exit code, or minus a signal.
        asked: whether it was ``sys.exit``.
        told: the traceback and the pickled exception, if it raised.
        echo: whether another worker's end may be behind it.
        text: what to say of it in one line.
        halted: for how long it had been stopped by a signal, if it was ended for that.
    """

    rank: int
    status: int
    asked: bool
    told: tuple[str, bytes] | None
    echo: bool
    text: str
    halted: float = 0.0


@dataclass(frozen=True)
class Done:
    """A host's part of a world whose workers have all returned.

    Attributes:
        world: the world's number.
        place: the host's place in it.
        size: how many hosts it has.
        values: what the workers returned, packed, by local rank.
    """

    world: int
    place: int
    size: int
    values: list[bytes]


@dataclass(frozen=True)
class Failed:
    """A host's part of a world that failed once too often."""

    world: int
    failures: list[WorkerFailure]


def _open_store(address: str) -> dist.TCPStore:
    """A store that listens at this address of this machine, and at no other."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as listener:
        listener.bind((address, 0))
        listener.listen(1024)
        return dist.TCPStore(
            address,
            listener.getsockname()[1],
            None,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


def serve(place: Place, task: bytes) -> Done | Failed:
    """Take part in the launch until a world of this host has returned, or has failed for good.

    Args:
        place: which host this is.
        task: the packed function and its arguments.
    """
    if place.workers > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    setproctitle.setproctitle(f"todist: elastic agent of {place.name}")
    store = dist.TCPStore(
        place.address, place.port, None, wait_for_workers=False, timeout=timedelta(seconds=STORE_SECONDS)
    )
    with _Output(place) as output:
        output.tell(news="here")
        while not store.check(["go"]):
            time.sleep(MONITOR_SECONDS / 2)
        agent = _Agent(place, store, task, output)
        try:
            result = agent.run()
        except SignalException as ended:
            raise SystemExit(128 + ended.sigval) from None
    return agent.failed or agent.done(result)


class _Rendezvous(DynamicRendezvousHandler):
    """Torch's, which also tells when a host of the world has gone."""

    world_size = 0
    may_leave: Callable[[], bool]

    @property
    def use_agent_store(self) -> bool:
        """Workers find a store at MASTER_PORT, and need not open one."""
        return True

    @property
    def world(self) -> int:
        """The number of the world, from 0."""
        return int(self._state_holder.state.round)

    def next_rendezvous(self) -> RendezvousInfo:
        """Torch's, without the store that it would keep from world to world."""
        with _variable("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1"):
            info = super().next_rendezvous()
        self.world_size = info.world_size
        return info

    def missing(self) -> int:
        """How many hosts of the world have gone."""
        self.is_closed()  # reads the state
        return max(0, self.world_size - len(self._state_holder.state.participants))

    def num_nodes_waiting(self) -> int:
        """How many hosts have come or gone; none if the world's work is done."""
        changed = super().num_nodes_waiting() + self.missing()
        return changed if changed and self.may_leave() else 0


class _Agent(LocalElasticAgent):
    """Torch's, with a store for each world, a judge of failures, and an end that all hosts agree on."""

    def __init__(self, place: Place, store: dist.Store, task: bytes, output: _Output) -> None:
        self._place, self._launcher, self._task, self._output = place, store, task, output
        self._address = local_address(place.address)
        self._answers = [os.memfd_create("todist", os.MFD_CLOEXEC) for _ in range(place.workers)]
        self._master: dist.Store | None = None
        self._result: RunResult | None = None
        self._world = self._rank = self._size = 0
        self._meeting: dist.Store = store
        self.failed: Failed | None = None
        self._handler = _Rendezvous.from_backend(
            place.run_id,
            store,
            C10dRendezvousBackend(store, place.run_id),
            place.min_hosts,
            place.max_hosts,
            self._address,
            RendezvousTimeout(FOREVER, timedelta(seconds=LAST_CALL_SECONDS), FOREVER, FOREVER),
            HEARTBEAT_SECONDS,
            HEARTBEATS,
        )
        self._handler.may_leave = self._leave
        spec = WorkerSpec(
            role="default",
            local_world_size=place.workers,
            rdzv_handler=self._handler,
            entrypoint=self._work,
            max_restarts=place.max_restarts,
            monitor_interval=MONITOR_SECONDS,
            local_addr=self._address,
        )
        super().__init__(
            spec,
            logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
            start_method="fork",
            exit_barrier_timeout=HEARTBEAT_SECONDS * HEARTBEATS,
        )

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        while True:
            try:
                super()._rendezvous(worker_group)
                group: Any = worker_group  # whose attributes torch declares as `None`
                self._meeting, self._rank, self._size = group.store, group.group_rank, group.group_world_size
                if self._rank == 0:
                    if self._place.here and self._launcher.check(["here"]):
                        self._address = self._launcher.get("here").decode()  # as other machines know this one
                    self._master = _open_store(self._address)
                    self._meeting.set("todist/master", f"{self._master.port} {self._address}")
                port, group.master_addr = self._meeting.get("todist/master").decode().split(" ")
                group.master_port = int(port)
                return
            except dist.DistError:  # a host was lost before it had told its rank: meet again
                continue

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        # What torch calls the number of restarts is that of earlier worlds.
        self._world = self._handler.world
        self._remaining_restarts = worker_group.spec.max_restarts - self._world
        self._result = None
        self._halted: dict[int, float] = {}
        """Since when workers have been stopped, by local rank."""
        for answer in self._answers:
            os.ftruncate(answer, 0)
        self._output.tell(
            news="world",
            world=self._world,
            size=self._size,
            workers=worker_group.workers[0].world_size,
        )
        return super()._start_workers(worker_group)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown(timeout=self._place.stop_timeout)  # type: ignore[arg-type]

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = self._result or super()._monitor_workers(worker_group)
        if result.state == WorkerState.HEALTHY:
            self._notice_halted()
            return result
        if result.state == WorkerState.SUCCEEDED:
            if self._result is None:
                self._result = result
                self._meeting.add("todist/done", 1)
            if self._meeting.add("todist/done", 0) == self._size:
                self._end("done")
            return result if self._ended() == b"done" else RunResult(state=WorkerState.HEALTHY)
        self._judge(worker_group, result)
        return result

    def _notice_halted(self) -> None:
        """End workers that a signal has stopped, and that do not go on."""
        seconds = self._place.halted_timeout
        if seconds is None:
            return
        for worker in self.get_worker_group().workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                if psutil.Process(worker.id).status() != psutil.STATUS_STOPPED:
                    self._halted.pop(worker.local_rank, None)
                elif (
                    time.monotonic() > self._halted.setdefault(worker.local_rank, time.monotonic()) + seconds
                ):
                    os.kill(worker.id, signal.SIGKILL)

    def _leave(self) -> bool:
        """Whether this host may leave the world: not if all have done their work."""
        return self._end("left") != b"done"

    def _end(self, how: str) -> bytes:
        """How the world ended: what the first host to say so has said."""
        end: bytes = self._meeting.compare_set("todist/end", "", how)
        return end

    def _ended(self) -> bytes:
        return bytes(self._meeting.get("todist/end")) if self._meeting.check(["todist/end"]) else b""

    def _judge(self, worker_group: WorkerGroup, result: RunResult) -> None:
        """Ask the launcher whether the workers are to be started again."""
        world, verdict = self._world, f"verdict/{self._world}"
        failures = self._failures(worker_group, result)
        cause = min(failures, key=lambda failure: (failure.echo, failure.told is None))
        self._output.tell(
            news="failed",
            world=world,
            echo=cause.echo,
            raised=cause.told is not None,
            text=cause.text[:LONGEST_TEXT],
        )
        told = False
        while not self._launcher.check([verdict]):
            time.sleep(MONITOR_SECONDS / 2)
            if not told and self._handler.missing():
                told = True
                self._output.tell(news="missing", world=world)
        if self._launcher.get(verdict) == b"again":
            self._remaining_restarts = 1  # for torch to take one
        else:
            self._remaining_restarts = 0
            self.failed = Failed(world, failures)

    def _failures(self, worker_group: WorkerGroup, result: RunResult) -> list[WorkerFailure]:
        statuses = {failure.local_rank: failure.exitcode for failure in result.failures.values()}
        found = []
        for worker, answer in zip(worker_group.workers, self._answers, strict=True):
            said = _read(answer)
            if said is not None and not said[0]:
                _, asked, status, told, echo, text = said
                found.append(WorkerFailure(worker.global_rank, status, asked, told, echo, text))
            elif worker.local_rank in statuses:
                status = statuses[worker.local_rank]
                how = f"was ended by signal {-status}" if status < 0 else f"exited with code {status}"
                halted = time.monotonic() - self._halted.get(worker.local_rank, math.inf)
                how = f"was stopped for {halted:.1f} s" if halted > 0 else how
                found.append(
                    WorkerFailure(worker.global_rank, status, False, None, status >= 0, how, max(halted, 0.0))
                )
        return found or [WorkerFailure(worker_group.workers[0].global_rank, 1, False, None, True, "unknown")]

    def done(self, result: RunResult) -> Done:
        """What the workers have returned."""
        values = []
        for answer in self._answers:
            said = _read(answer)
            assert said is not None
            assert said[0], result
            values.append(said[1])
        return Done(self._world, self._rank, self._size, values)

    def _work(self) -> None:
        """The life of a worker, in a process forked by torch."""
        local_rank = int(os.environ["LOCAL_RANK"])
        rank = int(os.environ["RANK"])
        _become_worker(self._output, local_rank, rank)
        answer = self._answers[local_rank]
        try:
            function, args, kwargs = _load(self._task)
            value = function(*args, **kwargs)
            _write(answer, (True, _dump(value, rank)))
            del function, args, kwargs, value
        except BaseException as error:
            code: object = error.code if isinstance(error, SystemExit) else 1
            status = code if isinstance(code, int) else int(code is not None)
            asked = isinstance(error, SystemExit)
            echo = isinstance(error, Exception) and may_be_an_echo(error)
            text = f"called sys.exit({status})" if asked else f"{type(error).__name__}: {error}"
            told = None if asked else _describe(error)
            _write(answer, (False, asked, status, told, echo, text))
            _leave(status or 1)
        with contextlib.suppress(Exception):
            atexit._run_exitfuncs()
        _flush()


def _become_worker(output: _Output, local_rank: int, rank: int) -> None:
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    output.become_worker(local_rank, rank)
    setproctitle.setproctitle(f"todist: rank {rank} of {os.environ['WORLD_SIZE']}: {' '.join(sys.argv)}")
    threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    count = int(threads) if threads.isdecimal() and int(threads) else len(os.sched_getaffinity(0))
    importlib.import_module("torch").set_num_threads(count)
    importlib.import_module("numpy.random").seed()


def _load(task: bytes) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    try:
        loaded: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] = cloudpickle.loads(task)
    except Exception as error:
        raise SerializationError(
            f"the function or its arguments cannot be read on the worker: {type(error).__name__}: {error}"
        ) from error
    return loaded


def _dump(value: object, rank: int) -> bytes:
    try:
        dumped: bytes = cloudpickle.dumps(value)
    except Exception as error:
        raise SerializationError(
            f"rank {rank} returned {type(value).__name__} {value!r:.200}, which cannot be sent to the launcher: "
            f"{type(error).__name__}: {error}"
        ) from None
    return dumped


def _describe(error: BaseException) -> tuple[str, bytes]:
    failure = RemoteFailure.of(error)
    try:
        return failure.traceback, cloudpickle.dumps(failure)
    except Exception:  # its parts can be sent one by one, and yet not together
        return failure.traceback, b""


def _write(answer: int, said: tuple[Any, ...]) -> None:
    with open(answer, "wb", closefd=False) as file:
        file.seek(0)
        cloudpickle.dump(said, file)


def _read(answer: int) -> Any:
    """What a worker has said, if it came to that."""
    if not os.fstat(answer).st_size:
        return None
    try:
        return unpack(os.dup(answer))
    except Exception:  # it was ended while it spoke
        return None


def _leave(status: int) -> NoReturn:
    """A worker that has failed ends as a program does, but for what torch would write on its standard error."""
    try:
        atexit._run_exitfuncs()
    finally:
        _flush()
        os._exit(status)


def _flush() -> None:
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()


class _Output:
    """The workers' pipes → lines on this process's standard output that say whose they are."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._lock = threading.Lock()
        self._ranks: dict[tuple[int, str], int] = {}
        self._readers = {
            (local_rank, stream): LineReader(self, 0, local_rank, place.name, stream)  # type: ignore[arg-type]
            for local_rank in range(place.workers)
            for stream in ("stdout", "stderr")
        }
        self._stop, self._stopped = os.pipe2(os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._pump, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._stopped)
        self._thread.join()
        for reader in self._readers.values():
            reader.drain()

    def tell(self, **news: object) -> None:
        """Tell the launcher."""
        self._say(f"!{json.dumps(news)}")

    def become_worker(self, local_rank: int, rank: int) -> None:
        """In a worker: write into its pipes, whose first line is its rank."""
        for descriptor, stream in ((1, "stdout"), (2, "stderr")):
            end = self._readers[local_rank, stream].for_worker
            os.write(end, f"{MARK}{rank}\n".encode())
            os.dup2(end, descriptor)

    def write(self, line: str, rank: int, local_rank: int, host: str, stream: str) -> None:
        """Hand on a worker's line: what a :class:`LineReader` calls."""
        del rank, host
        if line.startswith(MARK):
            self._ranks[local_rank, stream] = int(line.removeprefix(MARK))
        else:
            place = f"{stream[3]}{self._ranks.get((local_rank, stream), 0)} {local_rank}"
            for start in range(0, max(len(line), 1), LONGEST_PART):
                self._say(f"{place} {line[start : start + LONGEST_PART]}")

    def _say(self, text: str) -> None:
        data = memoryview(f"{MARK}{text}\n".encode("utf-8", "replace"))
        with self._lock:
            while data:
                data = data[os.write(1, data) :]

    def _pump(self) -> None:
        with selectors.DefaultSelector() as selector:
            for reader in self._readers.values():
                selector.register(reader, selectors.EVENT_READ, reader)
            selector.register(self._stop, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.data is None:
                        return
                    key.data.read()


@contextlib.contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
