"""``todist.status``: what each worker has in hand, and which workers do not answer."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time

import pytest
import torch

import torchopt_dist as todist
from torchopt_dist.errors import NotInitializedError


def square(x):
    return (x**2).sum()


LOCK = threading.Lock()
RPC_AND_ZMQ = pytest.mark.parametrize("transport", [pytest.param("rpc", marks=pytest.mark.torch_rpc), "zmq"])


def other():
    with LOCK:
        return "other"


def slow():
    return todist.remote_call(other, 0)


class Waits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        todist.remote_call(other, 0)
        return grad


def line(function):
    return f"(test_status.py:{function.__code__.co_firstlineno + 1})"


def seen_while(waiting, count):
    """The status, from another thread, while ``waiting`` waits for ``LOCK``: as soon as there are so many tasks."""
    seen = []

    def look():
        try:
            while not seen or sum(len(worker.tasks) for worker in seen[-1]) < count:
                seen.append(todist.status())
        finally:
            LOCK.release()

    LOCK.acquire()
    thread = threading.Thread(target=look)
    thread.start()
    waiting()
    thread.join()
    return seen[-1]


def what_runs(status):
    return [(dict(worker.waits_for), worker.tasks) for worker in status]


@RPC_AND_ZMQ
def test_calls_that_wait_for_each_other_are_seen(world, transport):
    def body():
        x = torch.ones(2, requires_grad=True)
        loss = todist.remote_call(Waits.apply, 1, x).sum()
        in_call = seen_while(lambda: todist.remote_call(slow, 1), 2)
        in_backward = seen_while(loss.backward, 2)
        here = seen_while(lambda: todist.remote_call(slow, 0), 2)  # in one process, one call in the other
        while any(runs != ({}, ()) for runs in what_runs(todist.status())):
            pass
        return what_runs(in_call), str(in_call), what_runs(in_backward), what_runs(here)

    in_call, text, in_backward, here = world(2).on_zero(body, transport=transport, timeout=100)
    runs_other = f"other {line(other)}"
    assert in_call == [({"worker1": 1}, (runs_other,)), ({"worker0": 1}, (f"slow {line(slow)}",))]
    assert text.splitlines()[3:] == [
        f"worker0 waits for worker1 and runs {runs_other}",
        f"worker1 waits for worker0 and runs slow {line(slow)}",
    ]
    place = line(Waits.backward).replace(")", "").partition(":")[2]
    assert in_backward == [
        ({"worker1": 1}, (runs_other,)),
        ({"worker0": 1}, (f"backward (test_status.py:{int(place) + 1})",)),
    ]
    assert here == [({}, (runs_other, f"slow {line(slow)}")), ({}, ())]


def test_tasks_that_are_equal_or_no_python(world, tmp_path):
    def body():
        os.mkfifo(tmp_path / "pipe")
        opened = functools.partial(os.open, flags=os.O_RDONLY)  # which waits for who writes
        calls = [todist.remote_async_call(opened, args=(tmp_path / "pipe",), partitioner=1) for _ in range(2)]
        calls.append(todist.remote_async_call(wait_for, args=(tmp_path / "go",), partitioner=1))
        while len((status := todist.status())[1].tasks) < 3:
            pass
        (tmp_path / "go").touch()
        pipe = os.open(tmp_path / "pipe", os.O_WRONLY)
        for call in calls:
            call.wait()
        os.close(pipe)
        return str(status)

    here, there = world(2).on_zero(body, timeout=100).splitlines()[3:]
    assert here == "worker0 waits for worker1 3 times"
    assert there.startswith("worker1 runs open 2 times, wait_for (test_status.py:")


def wait_for(path):
    while not path.exists():
        time.sleep(0.01)


def test_each_worker_tells_what_it_has(world, tmp_path):
    def body():
        x, data = torch.ones(3, requires_grad=True), todist.put(torch.ones(1000))
        results = [todist.remote_call(square, 1, x) for _ in range(2)]
        todist.remote_call(torch.sum, 1, data)
        future = todist.remote_async_call(wait_for, args=(tmp_path / "go",), partitioner=1)
        while (busy := todist.status())[0].requests != 1:
            pass  # a reply is counted out a moment after its caller goes on
        here, there = busy
        (tmp_path / "go").touch()
        future.wait()
        del results
        while todist.status()[1].kept_graphs:  # the request to forget them is on its way
            pass
        return here, there, str(busy), todist.status()

    here, there, text, after = world(2).on_zero(body, timeout=100)
    assert (here.rank, here.name, here.state) == (0, "worker0", "alive")
    assert (there.rank, there.name, there.state) == (1, "worker1", "alive")
    assert here.process != there.process
    assert (here.requests, there.requests) == (1, 0)
    assert (here.kept_graphs, there.kept_graphs) == (0, 2)
    assert (there.residents, there.resident_bytes) == (1, 4000)
    assert min(here.memory, there.memory) > 10_000_000
    assert [worker.name for worker in after] == ["worker0", "worker1"]
    lines = text.splitlines()
    assert lines[0].split()[:4] == ["worker", "host", "state", "requests"]
    assert "1 (4.0 kB)" in lines[2]


def test_workers_that_are_lost_or_silent(world):
    def body():
        if todist.get_rank():
            return None
        _, stopped, killed = (worker.process for worker in todist.status())
        os.kill(killed, signal.SIGKILL)
        os.kill(stopped, signal.SIGSTOP)
        while (found := [worker.state for worker in todist.status(0.3)]) != ["alive", "silent", "lost"]:
            assert found[2] in ("alive", "silent", "lost")
        os.kill(stopped, signal.SIGCONT)
        while todist.status()[1].state != "alive":
            pass
        return found

    endings = world(3).endings(body, on_loss="continue", timeout=60)
    assert endings[0].value == ["alive", "silent", "lost"]


def test_without_a_group_and_with_a_wrong_timeout():
    with pytest.raises(NotInitializedError):
        todist.status()

    @todist.auto_init_rpc()
    def main():
        with pytest.raises(ValueError, match=r"timeout must be above 0 seconds, got 0"):
            todist.status(0)
        return todist.status()

    (alone,) = main()
    assert alone.process == os.getpid()
