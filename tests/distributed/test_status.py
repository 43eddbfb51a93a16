"""``todist.status``: what each worker has in hand, and which workers do not answer."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

import torchopt_dist as todist
from torchopt_dist.errors import NotInitializedError


def square(x):
    return (x**2).sum()


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
