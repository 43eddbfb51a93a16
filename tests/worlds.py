"""``world(n).run(fn)``: n fresh worker processes in one RPC group → what ``fn`` returned or raised on each."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import cloudpickle

import torchopt_dist as todist

SHARES = 16
_given: set[int] = set()
PRELOAD = ["pytest", "torch", "torch._dynamo", "torch.distributed.rpc", "torchopt_dist", "tests.worlds"]


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
    """n worker processes, forked from a server that has imported torch already."""

    def __init__(self, size: int, *, env: dict[str, str] | None = None) -> None:
        self.size = size
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

    def work(self) -> Callable[..., None]:
        """What each process does."""
        return _work

    def endings(
        self, function: Callable[..., Any], *args: Any, timeout: float = 200.0, **options: Any
    ) -> list[Ending]:
        """How every rank ended; never raises what a rank raised."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        task = cloudpickle.dumps((function, args, options))
        port = free_port()
        started = time.monotonic()
        endings, processes, pipes, lives = [], [], {}, []
        for rank in range(self.size):
            env = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self.size),
                "LOCAL_WORLD_SIZE": str(self.size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                **self.env,
            }
            receiver, sender = context.Pipe(duplex=False)
            life, held = context.Pipe(duplex=False)
            arguments = (life, self.work(), env, sys.path, task, sender)
            process = context.Process(target=_while_the_test_lives, args=arguments, daemon=True)
            process.start()
            sender.close()
            life.close()
            lives.append(held)
            endings.append(Ending(rank))
            processes.append(process)
            pipes[receiver] = rank
        try:
            self._collect(endings, pipes, started, timeout)
            for ending, process in zip(endings, processes, strict=True):
                process.join(max(1.0, timeout - (time.monotonic() - started)))
                ending.exitcode = process.exitcode
        finally:
            for process in processes:
                if process.is_alive():
                    os.kill(process.pid, signal.SIGKILL)
                    process.join()
        return endings

    def _collect(
        self, endings: list[Ending], pipes: dict[Connection, int], started: float, timeout: float
    ) -> None:
        while pipes:
            ready = wait(list(pipes), max(0.0, timeout - (time.monotonic() - started)))
            if not ready:
                raise TimeoutError(f"ranks {sorted(pipes.values())} have not ended after {timeout:g} s")
            for pipe in ready:
                ending = endings[pipes.pop(pipe)]
                ending.seconds = time.monotonic() - started
                with contextlib.suppress(EOFError):  # it died without a word
                    ending.value, ending.error, ending.trace = cloudpickle.loads(pipe.recv_bytes())
                pipe.close()


@dataclass
class _ZeroOnly:
    function: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        return self.function(*args) if todist.get_rank() == 0 else None


def _while_the_test_lives(life: Connection, work: Callable[..., None], *arguments: Any) -> None:
    def end_with_it() -> None:
        with contextlib.suppress(EOFError):
            life.recv_bytes()
        os._exit(1)  # its process is gone, ended by a time-out perhaps

    threading.Thread(target=end_with_it, daemon=True).start()
    work(*arguments)


def _work(env: dict[str, str], path: list[str], task: bytes, sender: Connection) -> None:
    os.environ.update(env)
    sys.path[:] = path
    import torch

    torch.set_num_threads(1)
    try:
        function, args, options = cloudpickle.loads(task)
        # Called so that `auto_init_rpc` decorates a plain function, as in a program.
        answer = (todist.auto_init_rpc(**options)(lambda: function(*args))(), None, "")
    except BaseException as error:
        answer = (None, error, traceback.format_exc())
    try:
        data = cloudpickle.dumps(answer)
    except Exception as error:
        data = cloudpickle.dumps((None, TypeError(f"cannot send {answer!r}: {error}"), ""))
    sender.send_bytes(data)
    sender.close()
    if answer[1] is not None:
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
