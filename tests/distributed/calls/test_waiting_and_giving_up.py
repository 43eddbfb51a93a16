"""Calls whose caller does not wait, waits too short, or leaves in the middle: nothing is lost, kept or left waiting."""

from __future__ import annotations

import gc
import math
import sys
import time

import pytest
import torch

import torchopt_dist as todist
from tests.distributed.programs import kept_on, remote
from tests.waits import say, watch

BIG = 1 << 21  # elements


def slow_square(x):
    time.sleep(0.3)
    return x**2


def test_an_async_call_sends_what_its_arguments_are_now(world):
    """Large tensors are read while they are sent."""

    def body():
        for _ in range(5):
            x = torch.ones(BIG)
            future = todist.remote_async_call(torch.sum, args=(x,), partitioner=1)
            x.zero_()
            assert future.wait() == [BIG]

    world(2).on_zero(body)


def test_an_own_share_that_exits_is_an_error_of_its_future(world):
    def body():
        future = todist.remote_async_call(sys.exit, args=(3,), partitioner=0)
        with pytest.raises(todist.RemoteError, match="SystemExit"):
            future.wait()

    world(1).on_zero(body)


def test_a_graph_that_comes_too_late_is_not_kept(world):
    def body():
        x = torch.ones(2, requires_grad=True)
        for _ in range(3):
            with pytest.raises(todist.CallTimeoutError):
                todist.remote_sync_call(slow_square, args=(x,), partitioner=1, timeout=0.05)
        deadline = time.monotonic() + 10
        while kept_on(1, limit=0.2) and time.monotonic() < deadline:
            gc.collect()  # errors hold frames, and these hold calls
        assert kept_on(1) == 0

    world(2).on_zero(body)


@pytest.mark.parametrize("timeout", [math.inf, 1e7, 5e-4])
def test_time_outs_that_torch_cannot_count(world, timeout):
    def body():
        if timeout >= 1:
            assert todist.remote_sync_call(slow_square, args=(3,), partitioner=1, timeout=timeout) == [9]
        else:
            with pytest.raises(todist.CallTimeoutError):
                todist.remote_sync_call(slow_square, args=(3,), partitioner=1, timeout=timeout)
            time.sleep(0.5)

    world(2).on_zero(body)


def test_a_time_out_that_is_no_number_is_refused(world):
    def body():
        with pytest.raises(ValueError, match="timeout must be at least 0 seconds, got nan"):
            todist.remote_sync_call(slow_square, args=(3,), partitioner=0, timeout=math.nan)

    world(1).on_zero(body)


def test_an_endless_report_reaches_the_others(world):
    def body():
        if todist.get_rank() == 1:
            raise RuntimeError("begin" + "\N{GRINNING FACE}" * 3_000_000 + "end")
        todist.barrier()

    outcome = world(2).endings(body, timeout=100)
    assert "characters left out" in str(outcome[0])


def worker_s_own(x):
    own = torch.ones(2, requires_grad=True)
    return (own * 2).sum(), (own * x.detach()).sum()


def test_a_result_that_depends_on_the_worker_s_own_parameters_alone_does_not_require_grad(world):
    def body():
        for value in remote(worker_s_own)(torch.ones(2)):
            with pytest.raises(RuntimeError, match="does not require grad"):
                value.backward()

    world(2).on_zero(body)


def test_vectorized_arguments_of_other_types_are_not_the_same(world):
    def body():
        tasks = [(0, (torch.ones(()), kind), {}) for kind in (1, True, 1.0)]
        with pytest.raises(TypeError, match="vectorize=True maps over tensors"):
            todist.remote_sync_call(
                lambda x, kind: x * (10 if kind is True else 2),
                partitioner=lambda: tasks,
                vectorize=True,
            )

    world(1).on_zero(body)


def in_own_share(tmp_path):
    """Waits on worker 0, and raises on others."""

    def function(x):
        if todist.get_rank() == 0:
            watch(tmp_path / "go")
            say(tmp_path / "done")
            return x
        raise ValueError(f"of rank {todist.get_rank()}")

    return function


@pytest.mark.parametrize("call", [todist.remote_sync_call, todist.remote_async_call])
def test_a_time_out_bounds_the_own_share(world, tmp_path, call):
    def body():
        def wait():
            value = call(in_own_share(tmp_path), args=(torch.ones(2),), partitioner=0, timeout=0.1)
            return value.wait() if isinstance(value, torch.futures.Future) else value

        with pytest.raises(
            todist.CallTimeoutError, match=r"function` on worker0 took longer than timeout=0\.1 s"
        ):
            wait()
        assert not (tmp_path / "done").exists()
        say(tmp_path / "go")
        assert watch(tmp_path / "done")  # it was not stopped

    world(1).on_zero(body)


def test_with_a_time_out_an_early_error_of_a_worker_is_told_before_the_own_share_ends(world, tmp_path):
    def body():
        with pytest.raises(ValueError, match="of rank 1"):
            todist.remote_sync_call(in_own_share(tmp_path), args=(torch.ones(2),), timeout=100)
        assert not (tmp_path / "done").exists()
        say(tmp_path / "go")

    world(2).on_zero(body)


def test_an_own_share_with_a_time_out_means_the_same(world):
    def body():
        x = torch.arange(6.0, dtype=torch.float64, requires_grad=True)
        gradients = []
        for timeout in (None, 100):
            torch.manual_seed(0)
            loss = todist.remote_sync_call(
                lambda x: (x**3 * torch.rand_like(x)).sum(), args=(x,), reducer=sum, timeout=timeout
            )
            (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
            gradients.append(
                (loss.item(), gradient.tolist(), torch.autograd.grad(gradient.sum(), x)[0].tolist())
            )
        assert gradients[0] == gradients[1]
        with pytest.raises(todist.RemoteError, match="SystemExit"):
            todist.remote_sync_call(sys.exit, args=(3,), partitioner=0, timeout=100)

    world(2).on_zero(body)


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, place):
        ctx.place = place
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        watch(ctx.place)
        return grad * 2, None


def doubled(x, place):
    return SlowBackward.apply(x, place)


@pytest.mark.parametrize("transport", [pytest.param("rpc", marks=pytest.mark.torch_rpc), "zmq"])
def test_a_time_out_bounds_backward(world, tmp_path, transport):
    def body():
        x = torch.ones(2, requires_grad=True)
        (late,) = todist.remote_sync_call(doubled, args=(x, tmp_path / "go"), partitioner=1, timeout=0.3)
        text = r"^`doubled` on worker1 took longer than timeout=0\.3 s"
        with pytest.raises(todist.CallTimeoutError, match=text):
            late.sum().backward()
        say(tmp_path / "go")
        (value,) = todist.remote_sync_call(doubled, args=(x, tmp_path / "go"), partitioner=1, timeout=100)
        value.sum().backward()
        assert x.grad.tolist() == [2.0, 2.0]

    world(2).on_zero(body, transport=transport)
