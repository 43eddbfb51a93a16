"""Shares that have begun on two workers leave nothing on either, also if both are late, and can come back to one."""

from __future__ import annotations

import time

import pytest
import torch

import torchopt_dist as todist
from tests.distributed.calls.test_lost_workers import LateBackward, survive
from tests.distributed.programs import kept_on
from tests.waits import say, watch


def later(folder, x):
    """``x**2``; on the caller after the time limit of the call, on the other worker later still."""
    if todist.get_rank():
        assert watch(folder / "counted", 60)
    else:
        assert watch(folder / "over", 60)
    return x**2


@pytest.mark.parametrize("transport", ["rpc", "zmq"])
def test_a_call_that_ends_on_two_workers_after_its_time_limit_leaves_no_graph(world, tmp_path, transport):
    def body():
        x = torch.full((), 3.0, requires_grad=True)
        with pytest.raises(todist.CallTimeoutError):
            todist.remote_sync_call(later, args=(tmp_path, x), partitioner=1, hedge_after=0.01, timeout=0.2)
        for who in ("over", "counted"):
            say(tmp_path / who)
            time.sleep(0.2)
        return kept_on(1, limit=2)

    assert survive(world(2), body, transport=transport) == 0


def both_late(folder, x):
    """``x**3``; late on rank 1, and on the caller in its backward."""
    if todist.get_rank():
        assert watch(folder / "counted", 60)
    return LateBackward.apply(x**3, folder, 0, "grad")


def test_a_share_of_a_worker_that_has_another_one_can_come_back_to_it(world, tmp_path):
    """The caller has run it, and forgets nothing of it at that worker, which has yet to make its graph."""

    def body():
        x = torch.full((), 3.0, requires_grad=True)
        call = todist.parallelize(1, lambda values: values[0], hedge_after=0.1)(both_late)
        values = [call(tmp_path, x) for _ in range(2)]  # the second one's worker still runs the first one
        say(tmp_path / "counted")
        time.sleep(0.2)
        (grad,) = torch.autograd.grad(values[1], x, retain_graph=True)
        say(tmp_path / "grad")
        del values
        return grad.item(), kept_on(1)

    assert survive(world(2), body) == (27.0, 0)
