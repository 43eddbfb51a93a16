"""A function, a command line, a launch → processes: the three ways in which tests start them.

Take the first that shows what the test is about:

1. ``World(n).run(function)``, for what workers do. It is the cheapest, and what a worker raises is raised here.
2. ``python(...)`` and ``torchrun(...)``, for programs as users start them: what they print, and how they end.
3. ``ON_TWO.run(function)``, or a ``Launcher`` of the test's own, for tests of the launcher itself.

The processes of the first two are forks of ``warm_python.py``, which has imported torch; those of the third are forks
of the launcher's own forkserver. A new Python takes seconds of a core to import torch, so a test that does not test the
start itself starts none.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import cloudpickle

import torchopt_dist as todist
from tests import without_rpc
from tests.warm_python import Fork, Job, warm_python
from torchopt_dist.launching import Launcher

ROOT = Path(__file__).parents[1]
PROGRAMS = ROOT / "tests" / "seeds" / "programs"
TIMEOUT = 250
"""Seconds for programs that take 1 to 5 on two idle cores; less than pytest's own time-out, which shows no output."""
SHARES = 16
_given: set[int] = set()


# The first way: workers that run a function.


@dataclass
class Ending:
    """How one rank ended: with a value or an error, its exit code, and after how many seconds."""

    rank: int
    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    exitcode: int | None = None
    seconds: float = 0.0


class World:
    """Workers that run a function: n processes with torchrun's variables, in one RPC group.

    Args:
        size: how many.
        rpc: whether ``auto_init_rpc`` decorates the function; if not, the function makes its own groups, or none.
        env: added to the environment.
        enter: what each rank does before all else.
    """

    def __init__(
        self,
        size: int,
        *,
        rpc: bool = True,
        env: Mapping[str, str] | None = None,
        enter: Callable[[int], None] | None = None,
    ) -> None:
        self.size, self.rpc, self.enter = size, rpc, enter
        self.env = env or {}

    def run(
        self, function: Callable[..., Any], *args: Any, timeout: float = 200.0, **options: Any
    ) -> list[Any]:
        """The values by rank of ``auto_init_rpc(**options)(function)(*args)``; raises what a rank raised."""
        endings = self.endings(function, *args, timeout=timeout, **options)
        failed = [ending for ending in endings if ending.error is not None]
        # The root of the trouble is the rank whose error is no mere echo of another's.
        echoes = (todist.PeerFailedError, todist.WorkerLostError)
        for ending in sorted(failed, key=lambda ending: isinstance(ending.error, echoes)):
            assert ending.error is not None
            print(ending.trace, file=sys.stderr)
            raise ending.error
        for ending in endings:
            assert ending.exitcode == 0, f"rank {ending.rank} ended with exit code {ending.exitcode}"
        return [ending.value for ending in endings]

    def on_zero(
        self, function: Callable[..., Any], *args: Any, timeout: float = 200.0, **options: Any
    ) -> Any:
        """What ``function`` returns on rank 0, the other ranks doing nothing but serve."""
        return self.run(_ZeroOnly(function), *args, timeout=timeout, **options)[0]

    def endings(
        self, function: Callable[..., Any], *args: Any, timeout: float = 200.0, **options: Any
    ) -> list[Ending]:
        """How every rank ended; never raises what a rank raised."""
        assert self.rpc or not options, f"without an RPC group there are no options of it, got {options}"
        task = cloudpickle.dumps((self.enter, function, args, options if self.rpc else None))
        started, deadline = time.monotonic(), time.monotonic() + timeout
        port = free_port()
        endings = [Ending(rank) for rank in range(self.size)]
        forks: list[Fork] = []
        channels: dict[Connection, int] = {}
        try:
            for rank in range(self.size):
                channel, fork = self._start(rank, port)
                channels[channel] = rank
                forks.append(fork)
            for channel in channels:
                with contextlib.suppress(OSError):  # it has died already
                    channel.send((sys.path, sys.argv))
                    channel.send_bytes(task)
            self._collect(endings, channels, started, deadline)
            for ending, fork in zip(endings, forks, strict=True):
                ending.exitcode = fork.poll(max(1.0, deadline - time.monotonic()))
        finally:
            for channel in channels:
                channel.close()
            for fork in forks:
                if fork.poll() is None:
                    os.kill(fork.pid, signal.SIGKILL)
                    fork.poll(None)
        return endings

    def _start(self, rank: int, port: int) -> tuple[Connection, Fork]:
        env = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_WORLD_SIZE": str(self.size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            **self.env,
        }
        ours, theirs = socket.socketpair()
        with theirs:
            command = ("-c", "from tests.processes import work; work()")
            hidden = without_rpc.VARIABLE in os.environ
            fork = warm_python(without_rpc.FOLDER if hidden else None).fork(
                *command, files=[theirs.fileno(), 1, 2], cwd=Path.cwd(), env=env
            )
        return Connection(ours.detach()), fork

    def _collect(
        self, endings: list[Ending], channels: dict[Connection, int], started: float, deadline: float
    ) -> None:
        while channels:
            ready = wait(list(channels), max(0.0, deadline - time.monotonic()))
            if not ready:
                late = sorted(channels.values())
                raise TimeoutError(f"ranks {late} have not ended after {deadline - started:g} s")
            for channel in ready:
                assert isinstance(channel, Connection)
                ending = endings[channels.pop(channel)]
                ending.seconds = time.monotonic() - started
                with channel, contextlib.suppress(EOFError, ConnectionResetError):  # it died without a word
                    ending.value, ending.error, ending.trace = cloudpickle.loads(channel.recv_bytes())


@dataclass
class _ZeroOnly:
    function: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        return self.function(*args) if todist.get_rank() == 0 else None


def work() -> None:
    """In a worker: the function comes by its standard input, and what it has returned or raised goes back there."""
    import torch

    with Connection(os.dup(0)) as channel:
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
        sys.path[:], sys.argv[:] = channel.recv()
        torch.set_num_threads(1)
        error: BaseException | None = None
        try:
            enter, function, args, options = cloudpickle.loads(channel.recv_bytes())
            if enter is not None:
                enter(int(os.environ["RANK"]))
            if options is not None:
                # Called so that `auto_init_rpc` decorates a plain function, as in a program.
                answer = (todist.auto_init_rpc(**options)(lambda: function(*args))(), None, "")
            else:
                answer = (function(*args), None, "")
        except BaseException as raised:
            error, answer = raised, (None, raised, traceback.format_exc())
        try:
            data = cloudpickle.dumps(answer)
        except Exception as unsendable:
            data = cloudpickle.dumps((None, TypeError(f"cannot send {answer!r}: {unsendable}"), ""))
        channel.send_bytes(data)
    if isinstance(error, SystemExit):
        raise error
    if error is not None:
        sys.exit(1)


def free_port() -> int:
    """A port at which nobody listens, and which nobody else gets before the test listens there.

    The kernel gives ports of its own range to those who ask for any, so this one lies outside. Workers of pytest-xdist
    share what is left, and no port is given twice.
    """
    own = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first = int(own.read_text().split()[0]) if own.exists() else 32_768
    ports = range(12_000, first) if first > 20_000 else range(61_000, 65_536)
    share = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % SHARES
    while True:
        port = random.SystemRandom().choice(ports)  # a test may have set the seed of the others
        if port % SHARES == share and port not in _given:
            with contextlib.suppress(OSError), socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
                _given.add(port)
                return port


# The second way: a program as a user starts it.


def start_python(*arguments: object, **options: Any) -> Job:
    """A program on its way: ``python`` with these arguments, from the root of the tree, which it can import.

    Args:
        arguments: as on the command line; see :meth:`WarmPython.start`.
        options: of :meth:`WarmPython.start`; ``warm=False`` makes a new Python, for tests of the start itself.
    """
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    return warm_python().start(*arguments, **{"cwd": ROOT, "env": environ, **options})


def python(*arguments: object, timeout: float = TIMEOUT, **options: Any) -> subprocess.CompletedProcess[str]:
    """A program that has ended: its output and its exit code."""
    with start_python(*arguments, **options) as job:
        return job.finish(timeout)


def start_torchrun(*arguments: object, warm: bool = True, cwd: Path = ROOT, **env: str) -> Job:
    """A job of ``torchrun`` on its way.

    Args:
        arguments: torchrun's.
        warm: whether torchrun and its workers are forks of a process that has imported torch; if not, each is a new
            Python, as ``torchrun`` on the command line makes them.
        cwd: the working directory.
        env: added to the environment.
    """
    forked = ("--run-path", "--start-method=fork") if warm else ()
    # Forked workers find the programs that are beside theirs as a new Python finds them.
    given = [folder for folder in [os.environ.get("PYTHONPATH")] if folder]
    path = os.pathsep.join(map(str, (ROOT, *([PROGRAMS] if warm else []), *given)))
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **env}
    command = ("-m", "torch.distributed.run", *forked, *arguments)
    return warm_python().start(*command, cwd=cwd, env=environ, merged=True, warm=warm)


def finish(*jobs: Job, timeout: float = TIMEOUT) -> list[str]:
    """The output of each job; fails with it if a job ends with an error or not at all."""
    outputs = []
    with contextlib.ExitStack() as stack:
        for job in jobs:
            stack.enter_context(job)
        for job in jobs:
            try:
                done = job.finish(timeout)
            except subprocess.TimeoutExpired as late:
                raise AssertionError(f"not ended after {timeout} s: {late.cmd}\n{late.stdout}") from None
            assert done.returncode == 0, f"exit code {done.returncode} of {done.args}\n{done.stdout}"
            outputs.append(done.stdout)
    return outputs


def torchrun(*arguments: object, timeout: float = TIMEOUT, **options: Any) -> str:
    """The output of one job of ``torchrun`` that has ended well, with the options of :func:`start_torchrun`."""
    return finish(start_torchrun(*arguments, **options), timeout=timeout)[0]


# The third way: a launch from Python.


ON_TWO = Launcher(nproc_per_host=2, handlers=[])
"""Launches functions on two workers of this machine."""
