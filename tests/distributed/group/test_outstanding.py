"""Requests that are sent without waiting for replies are bounded, and so are the threads here and on the workers."""

from __future__ import annotations

import threading

import pytest
import torch

import torchopt_dist as todist
from torchopt_dist.distributed.group import outstanding

LIMIT = 20


class Peak:
    """How many threads are inside, and were at most; none leaves before ``LIMIT`` have come, or all of the last."""

    running = most = entered = 0
    changed = threading.Condition()

    @classmethod
    def enter(cls, total):
        with cls.changed:
            cls.running, cls.entered = cls.running + 1, cls.entered + 1
            cls.most = max(cls.most, cls.running)
            cls.changed.notify_all()
            assert cls.changed.wait_for(lambda: cls.entered >= min(LIMIT, total), 60)
            if cls.entered <= LIMIT:  # those of a caller that does not wait come meanwhile
                cls.changed.wait_for(lambda: cls.most > LIMIT, 0.05)
            cls.running -= 1


def small_limits():
    outstanding.LIMIT, outstanding.LIMIT_OF_A_WORKER = LIMIT, 1


def work(x, number, total):
    Peak.enter(total)
    return Enters.apply(x * number, total)


class Enters(torch.autograd.Function):
    """The identity, whose backward counts itself."""

    @staticmethod
    def forward(ctx, x, total):
        ctx.total = total
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        Peak.enter(ctx.total)
        return grad, None


def most():
    peak, Peak.most, Peak.entered = Peak.most, 0, 0
    return peak


@pytest.mark.parametrize("transport", [pytest.param("rpc", marks=pytest.mark.nightly), "zmq"])
def test_a_thousand_calls_and_their_backward_take_few_threads(world, transport):
    def body():
        small_limits()
        todist.barrier()
        if todist.get_rank():
            return
        for rank in (0, 1):
            x, total, threads = torch.ones(3, requires_grad=True), 1000 if rank else 100, 0
            futures = []
            for number in range(total):
                futures.append(todist.remote_async_call(work, args=(x, number, total), partitioner=rank))
                threads = max(threads, threading.active_count())
            results = [future.wait()[0] for future in futures]
            assert [result[0].item() for result in results] == list(range(total))
            assert todist.remote_call(most, rank) <= LIMIT
            assert threads <= 2 * LIMIT + 20
            if rank:
                sum(results).sum().backward()
                assert x.grad[0] == sum(range(total))
                assert todist.remote_call(most, rank) <= LIMIT

    world(2).run(body, transport=transport)


def spread(depth, path=0):
    """A tree of asynchronous calls, of more at a time than may be under way, on all workers."""
    if not depth:
        return path
    futures = [
        todist.remote_async_call(
            spread, args=(depth - 1, 5 * path + number), partitioner=(path + number) % todist.get_world_size()
        )
        for number in range(5)
    ]
    return sum(future.wait()[0] for future in futures)


@pytest.mark.parametrize("transport", ["rpc", "zmq"])
def test_nested_calls_do_not_wait_for_each_other(world, transport):
    def body():
        outstanding.LIMIT, outstanding.LIMIT_OF_A_WORKER = 1, 0
        todist.barrier()
        return spread(3)

    assert world(2).run(body, transport=transport) == [sum(range(125))] * 2


def test_the_wait_for_an_earlier_call_ends_by_the_time_out():
    gate = threading.Event()

    def body():
        small_limits()
        futures = [
            todist.remote_async_call(gate.wait, args=(60,), partitioner=0, isolate_own_share=False)
            for _ in range(LIMIT)
        ]
        with pytest.raises(
            todist.CallTimeoutError, match=r"20 requests of this thread .* within timeout=0\.01 s"
        ):
            todist.remote_async_call(len, args=("",), partitioner=0, timeout=0.01)
        gate.set()
        assert [future.wait() for future in futures] == [[True]] * LIMIT
        for _ in range(2 * LIMIT):  # what could not be sent takes no slot for ever
            with pytest.raises(TypeError):
                todist.remote_async_call(3)

    before = outstanding.LIMIT, outstanding.LIMIT_OF_A_WORKER
    try:
        todist.auto_init_rpc()(body)()
    finally:
        outstanding.LIMIT, outstanding.LIMIT_OF_A_WORKER = before
