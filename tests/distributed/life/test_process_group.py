"""``auto_init_rpc(process_group=...)``: torch's process group beside remote calls, for as long as they are answered."""

from __future__ import annotations

import os
import signal
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import torchopt_dist as todist
from torchopt_dist.distributed.life import process_group


def total(x):
    dist.all_reduce(x)
    return x.item()


def test_main_and_calls_use_it_and_it_ends_after_the_last_call(world):
    def total_after_main(x):
        time.sleep(0.3)  # main returns on this worker
        return total(x)

    def main():
        own = total(torch.ones(1) + todist.get_rank())
        if todist.get_rank() == 1:
            return own, dist.get_backend()  # and answers the call then
        there = todist.remote_async_call(total_after_main, args=(torch.ones(1),), partitioner=1)
        return own, total(torch.ones(1)), there.wait()

    def program():
        made = []
        for _ in range(2):  # the second one does not read what the first has left in the store
            made.append(todist.auto_init_rpc(process_group="gloo")(main)())
            assert not dist.is_initialized()
        return made

    assert world(2, rpc=False).run(program) == [[(3.0, 2.0, [2.0])] * 2, [(3.0, "gloo")] * 2]


def test_shares_of_a_call_run_one_loop_together(world):
    def learn(x, w):
        made = todist.inner_loop(
            lambda w: ((w - x.mean()) ** 2).sum(),
            todist.sgd(lr=0.25),
            w,
            3,
            meta=w,
            adjoint=todist.Replayed(sharded=True),
            parallel=todist.DataParallel(),
        )
        return (made.params * x.mean()).sum().reshape(1)

    def main():
        x = torch.tensor([1.0, 2.0, 3.0, 6.0], dtype=torch.float64)
        w = torch.ones(2, dtype=torch.float64, requires_grad=True)
        if todist.get_rank() == 1:
            return None
        spread = todist.parallelize(todist.batch_partitioner, todist.concatenate_reducer)(learn)
        values = spread(x, todist.replicated(w))
        values.mean().backward()
        return values.tolist(), w.grad.tolist()

    def program():
        return todist.auto_init_rpc(process_group="gloo")(main)()

    (values, gradient), _ = world(2, rpc=False).run(program)
    # w goes from 1 by steps of half of the way to the mean of all, 3; each share's own mean is 1.5 or 4.5.
    assert values == [2.75 * 2 * 1.5, 2.75 * 2 * 4.5]
    assert gradient == [3 / 8, 3 / 8]


def test_a_worker_that_is_killed_in_a_loop_is_lost(world):
    def main():
        def loss(w):
            if todist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return (w**2).sum()

        todist.inner_loop(
            loss, todist.sgd(lr=0.1), torch.ones(2, requires_grad=True), 2, parallel=todist.DataParallel()
        )

    def program():
        return todist.auto_init_rpc(process_group="auto")(main)()

    ending = world(2, rpc=False).endings(program)[0]
    assert isinstance(ending.error, todist.WorkerLostError)
    assert ending.error.rank == 1


def test_what_cannot_be_is_told(world):
    with pytest.raises(ValueError, match="process_group must be 'gloo', 'nccl', 'auto' or None, got 'mpi'"):
        todist.auto_init_rpc(process_group="mpi")
    with pytest.raises(ValueError, match="on_loss must be 'end' with process_group"):
        todist.auto_init_rpc(process_group="gloo", on_loss="continue")

    def program():
        told = []
        for name, begin in (("nccl", False), ("gloo", True)):
            if begin:
                dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            try:
                todist.auto_init_rpc(process_group=name)(lambda: None)()
            except todist.errors.InitializationError as error:
                told.append(str(error))
        return told

    if not torch.cuda.is_available():
        without, twice = world(1, rpc=False).run(program)[0]
        assert "without a GPU, got 'nccl'" in without
        assert "where there is a process group already" in twice


def test_a_group_on_gpus_is_aborted_when_a_worker_is_lost(monkeypatch):
    aborted = []

    backends = ["cpu:gloo,cuda:nccl", "cpu:gloo"]
    stand_in = SimpleNamespace(
        is_initialized=lambda: True,
        get_backend_config=lambda: backends[0],
        group=SimpleNamespace(WORLD=SimpleNamespace(abort=lambda: aborted.append(backends[0]))),
    )
    monkeypatch.setattr(process_group, "dist", stand_in)
    process_group.abort_process_group()
    del backends[0]
    process_group.abort_process_group()
    assert aborted == ["cpu:gloo,cuda:nccl"]
