"""Workers are killed at random moments of a training: its parameters are those of an undisturbed one, bit for bit.

``TODIST_FUZZ_LOSSES=50`` kills so many (``make losses``).
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import pytest
import torch
import torch.nn.functional as F

import torchopt_dist as todist
from tests.distributed.calls.test_lost_workers import survive
from tests.distributed.programs import data, mlp

WORKERS = 4
LOSSES = int(os.environ.get("TODIST_FUZZ_LOSSES", "6"))
STEPS = 8


def adapted(model, x, y):
    """The loss after a step of an inner loop, with random numbers."""
    inner = todist.module_clone(model)
    optimizer = todist.MetaSGD(inner, lr=0.1)
    optimizer.step(F.mse_loss(F.dropout(inner(x), 0.2), y))
    return F.mse_loss(F.dropout(inner(x), 0.2), y)


def trained(partitioner, steps=STEPS):
    """The parameters after some steps down a loss that has a gradient in it."""
    torch.manual_seed(0)
    loss = todist.parallelize(partitioner, todist.mean_reducer, retries=2)(adapted)
    model = mlp()
    optimizer = todist.Adam(model.parameters(), lr=0.01)
    x, y = data(rows=22)
    for _ in range(steps):
        value = loss(model, x, y)
        slopes = torch.autograd.grad(value, [*model.parameters()], create_graph=True)
        optimizer.zero_grad()
        (value + sum(slope.square().sum() for slope in slopes)).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def with_losses(seed, losses):
    """Train once undisturbed, and then once for each loss: how many trainings had other parameters at their end."""
    chance = random.Random(seed)
    splits = {
        "one part each": todist.batch_partitioner,
        "tasks": todist.dim_partitioner(0, exclusive=True, keepdim=True),
    }
    split = splits[chance.choice(list(splits))]
    processes = {rank: todist.remote_call(os.getpid, rank) for rank in range(1, WORKERS)}
    undisturbed = trained(split)
    began = time.monotonic()
    assert all(map(torch.equal, trained(split), undisturbed))
    took = time.monotonic() - began
    for rank in chance.sample(range(1, WORKERS), losses):
        killer = threading.Timer(chance.uniform(0, took), os.kill, (processes[rank], signal.SIGKILL))
        killer.start()
        parameters = trained(split)
        killer.join()
        assert all(map(torch.equal, parameters, undisturbed)), f"rank {rank}"


@pytest.mark.parametrize("first", range(0, LOSSES, WORKERS - 1))
def test_workers_that_are_killed_at_random_moments_change_no_parameter(world, first):
    seed = int(os.environ.get("TODIST_FUZZ_SEED", time.time_ns() % 10**6)) + first
    print(
        f"TODIST_FUZZ_SEED={seed}"
    )  # shown where the test fails; the moments themselves depend on the machine
    survive(world(WORKERS), with_losses, seed, min(LOSSES - first, WORKERS - 1))
