"""What is late is started again elsewhere, a share or a backward: the first answer counts, and nothing is left."""

from __future__ import annotations

import time

import pytest
import torch

import torchopt_dist as todist
from tests.distributed.programs import count, kept_on, runs, survive
from tests.waits import say, watch


def late(folder, x, rank):
    """``x**2``; late on one rank, where it is asked for first."""
    count(folder)
    if todist.get_rank() == rank:
        assert watch(folder / "counted", 60)
    return x**2


def test_the_first_answer_of_a_share_that_is_late_counts(world, tmp_path):
    def body():
        x = torch.full((), 3.0, requires_grad=True)
        (value,) = todist.remote_sync_call(late, args=(tmp_path, x, 1), partitioner=1, hedge_after=0.1)
        (grad,) = torch.autograd.grad(value, x)
        ran = runs(tmp_path)
        say(tmp_path / "counted")
        return grad.item(), ran, kept_on(1), kept_on(2)

    assert survive(world(3), body) == (6.0, [1, 2], 0, 0)


class LateBackward(torch.autograd.Function):
    """The identity; its backward waits on one rank until something is said."""

    @staticmethod
    def forward(ctx, x, folder, rank, until):
        ctx.folder, ctx.rank, ctx.until = folder, rank, until
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        count(ctx.folder)
        if todist.get_rank() == ctx.rank:
            assert watch(ctx.folder / ctx.until, 60)
        return grad, None, None, None


def late_backward(folder, x):
    return LateBackward.apply(x**3, folder, 1, "counted")


def test_the_first_answer_of_a_backward_that_is_late_counts(world, tmp_path):
    def body():
        x = torch.full((), 3.0, requires_grad=True)
        call = todist.parallelize(1, lambda values: values[0], hedge_after=0.1)(late_backward)
        value = call(tmp_path, x)
        for _ in range(2):  # each time the late worker is asked, and its graph made again elsewhere
            (grad,) = torch.autograd.grad(value, x, retain_graph=True)
        ran = sorted(runs(tmp_path))
        say(tmp_path / "counted")
        del value
        return grad.item(), ran, kept_on(1), kept_on(2)

    assert survive(world(3), body) == (27.0, [1, 1, 2, 2], 0, 0)


class LateSecondBackward(torch.autograd.Function):
    """The identity; the backward of its backward runs on two workers, of which one is later."""

    @staticmethod
    def forward(ctx, x, folder, winner, order):
        ctx.folder, ctx.winner, ctx.order = folder, winner, order
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.order == 2:
            rank = todist.get_rank()
            say(ctx.folder / f"begun{rank}")
            assert watch(ctx.folder / ("counted" if rank != ctx.winner else "begun2"), 60)
        return LateSecondBackward.apply(grad, ctx.folder, ctx.winner, ctx.order + 1), None, None, None


def late_second_backward(folder, x, winner):
    return LateSecondBackward.apply(x, folder, winner, 1) ** 3


@pytest.mark.parametrize("winner", [1, 2])
def test_a_second_backward_that_runs_twice_leaves_no_graph(world, tmp_path, winner):
    """Neither those of the request nor those that lead there, on the worker that was sooner done or the other."""

    def body():
        x = torch.full((), 3.0, requires_grad=True)
        call = todist.parallelize(1, lambda values: values[0], hedge_after=0.1)(late_second_backward)
        value = call(tmp_path, x, winner)
        (first,) = torch.autograd.grad(value, x, create_graph=True)
        (second,) = torch.autograd.grad(first, x, retain_graph=True)
        (again,) = torch.autograd.grad(value, x)
        say(tmp_path / "counted")
        del value, first
        return second.item(), again.item(), kept_on(1), kept_on(2)

    assert survive(world(3), body) == (18.0, 27.0, 0, 0)


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
