"""Machines whose network is cut, for a while or for good, or is slow and loses packets → what becomes of calls."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

import torchopt_dist as todist
from tests.hosts import Hosts
from tests.launch.families import assert_gone
from tests.waits import say, soon, watch

pytestmark = pytest.mark.timeout(120)

PATIENCE = 3.0
LIVENESS = f"interval=0.5,patience={PATIENCE}"


def sleep(path: Path) -> None:
    say(path)
    time.sleep(60)


@contextlib.contextmanager
def when(path: Path, act: Callable[[], object]) -> Iterator[None]:
    """Meanwhile, in a thread: act as soon as there is that file, and note when."""

    def work() -> None:
        if watch(path, 60):
            say(path.with_name("then"), str(time.monotonic()))
            act()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def since(folder: Path) -> float:
    """Seconds from the moment at which :func:`when` has acted."""
    return time.monotonic() - float((folder / "then").read_text())


def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x @ w).square().mean()


@pytest.mark.parametrize("transport", ["rpc", "zmq"])
def test_a_cut_between_two_workers_that_rank_zero_reaches_is_told_by_their_call(tmp_path, transport):
    """Before it the network is slow and loses packets, after it the caller goes on with others."""

    def main():
        if todist.get_rank() != 1:
            return None
        x = torch.rand(300, 2000, dtype=torch.double)
        w = torch.rand(2000, dtype=torch.double, requires_grad=True)
        call = todist.parallelize(todist.batch_partitioner, todist.mean_reducer)(loss)
        gradients = [
            torch.autograd.grad(call(todist.replicated(w), x), w)[0],
            torch.autograd.grad(loss(w, x), w)[0],
        ]
        with pytest.raises(todist.WorkerLostError) as caught:
            todist.remote_sync_call(sleep, args=(tmp_path / "asleep",), partitioner=2)
        took = since(tmp_path)
        answers = todist.remote_sync_call(todist.get_rank, partitioner=0)
        return gradients, caught.value, took, answers

    with Hosts(3) as hosts:
        hosts.delay, hosts.loss = 0.002, 0.01
        world = hosts.world(TODIST_LIVENESS=LIVENESS)
        with when(tmp_path / "asleep", lambda: hosts.cut.add(frozenset((1, 2)))):
            endings = world.endings(main, transport=transport, timeout=100)  # it starts slowly
        assert hosts.lost > 0
    assert endings[1].error is None, endings[1].trace
    gradients, error, took, answers = endings[1].value
    torch.testing.assert_close(*gradients)
    assert "the network between worker1 on " in str(error)
    assert " and worker2 on " in str(error)
    assert (error.rank, error.worker, error.cause) == (2, "worker2", "unreachable")
    assert took < soon(PATIENCE + 1.0)
    assert answers == [0]
    assert [ending.exitcode for ending in endings] == [0, 0, 0], endings


@pytest.mark.parametrize("transport", ["rpc", "zmq"])
def test_a_network_that_is_cut_for_less_than_the_patience_costs_nothing_but_time(tmp_path, transport):
    """A call and a barrier are under way meanwhile."""

    def main():
        todist.barrier()
        gradient = None
        if todist.get_rank() == 0:
            say(tmp_path / "begun")
            assert watch(tmp_path / "then")
            time.sleep(0.1)
            x = torch.ones(300_000, requires_grad=True)
            todist.remote_sync_call(torch.sin, args=(x,), partitioner=1)[0].sum().backward()
            gradient = torch.allclose(x.grad, torch.cos(x))
            took = since(tmp_path)
        todist.barrier()
        return None if gradient is None else (gradient, took)

    def cut() -> None:
        hosts.cut.add(frozenset((0, 1)))
        time.sleep(2)
        hosts.cut.clear()

    with Hosts(2) as hosts, when(tmp_path / "begun", cut):
        right, took = hosts.world(TODIST_LIVENESS="patience=60").run(main, transport=transport, timeout=90)[0]
    assert right
    assert took > 2


def test_a_network_that_stays_cut_ends_both_sides_within_the_patience(tmp_path):
    def main():
        if todist.get_rank() == 0:
            todist.remote_sync_call(sleep, args=(tmp_path / "asleep",), partitioner=1)

    with Hosts(2) as hosts:
        world = hosts.world(TODIST_LIVENESS=LIVENESS)
        with when(tmp_path / "asleep", lambda: hosts.cut.add(frozenset((0, 1)))):
            endings = world.endings(main, timeout=60)
        assert since(tmp_path) < soon(PATIENCE + 5.0)  # the two cannot end together
    for rank, ending in enumerate(endings):
        assert isinstance(ending.error, todist.WorkerLostError), ending.trace
        assert (ending.error.rank, ending.error.cause) == (1 - rank, "unreachable")
        assert f"rank {1 - rank} was lost: the machine of worker{1 - rank} on" in str(ending.error)
        assert ending.exitcode == 1


@pytest.mark.parametrize("what", ["worker", "machine"])
def test_a_worker_that_is_stopped_alone_on_its_machine_is_noticed(tmp_path, what):
    """No other worker sees its process. Before that it holds the interpreter's lock for longer, and is alive."""
    patience = 2.0

    def main():
        if todist.get_rank() == 1 and what == "worker":
            ctypes.PyDLL(None).usleep(int(1.5 * patience * 1e6))
        todist.barrier()
        if todist.get_rank() == 1:
            (watchdog,) = psutil.Process().children()
            while (
                not watchdog.net_connections()
            ):  # a Python that has to start; before that rank 0 cannot miss it
                time.sleep(0.01)
            say(tmp_path / "pids", f"{os.getpid()} {watchdog.pid}")
            say(tmp_path / "stopped", str(time.monotonic()))
            if what == "machine":  # as when a container is frozen
                watchdog.suspend()
            psutil.Process().suspend()
        try:
            todist.barrier()
        finally:
            say(tmp_path / f"ended{todist.get_rank()}", str(time.monotonic()))

    def pids() -> list[int]:
        return [int(pid) for pid in (tmp_path / "pids").read_text().split()]

    def go_on() -> None:
        for pid in pids():
            psutil.Process(pid).resume()

    with Hosts(2) as hosts:
        world = hosts.world(TODIST_LIVENESS=f"interval=0.5,patience={patience}")
        with when(tmp_path / "ended0", go_on if what == "machine" else lambda: None):
            endings = world.endings(main, timeout=60)
    error = endings[0].error
    assert isinstance(error, todist.WorkerLostError), endings[0].trace
    assert (error.rank, error.cause) == (1, "stopped")
    took = float((tmp_path / "ended0").read_text()) - float((tmp_path / "stopped").read_text())
    assert patience < took < soon(patience + 1.0)
    assert_gone(pids())
    assert endings[1].exitcode == (1 if what == "machine" else -signal.SIGKILL)
