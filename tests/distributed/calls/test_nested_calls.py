"""Remote calls in remote calls, from several threads, and backwards on all workers at once."""

from __future__ import annotations

import gc
import threading
import time

import pytest
import torch

import torchopt_dist as todist
from tests.distributed.programs import chain, cube, kept_on, remote, vectors


@pytest.mark.parametrize("depth", [1, 8, 40])
def test_calls_nested_deeper_than_the_agent_has_threads(world, depth):
    def body():
        x, _ = vectors()
        (grad,) = torch.autograd.grad(chain(depth, x), x)
        torch.testing.assert_close(grad, 3 * x**2 * 1.1**depth)

    world(3).on_zero(body)


def test_second_order_through_nested_calls(world):
    def body():
        x, _ = vectors()
        (grad,) = torch.autograd.grad(chain(3, x), x, create_graph=True)
        (second,) = torch.autograd.grad(grad.sum(), x)
        torch.testing.assert_close(second, 6 * x.detach() * 1.1**3)

    world(2).on_zero(body)


def test_calls_in_flight_and_from_threads(world):
    def body():
        x, _ = vectors()
        futures = [
            todist.remote_async_call(lambda x, k: (x**k).sum(), args=(x, k), partitioner=k % 3)
            for k in range(12)
        ]
        (grad,) = torch.autograd.grad(sum(future.wait()[0] for future in futures), x)
        torch.testing.assert_close(grad, sum(k * x ** max(k - 1, 0) for k in range(12)))

        errors = []

        def work(k):
            try:
                mine = torch.full((3,), float(k), dtype=torch.float64, requires_grad=True)
                for _ in range(5):
                    (grad,) = torch.autograd.grad(remote(cube, 1 + k % 2)(mine), mine)
                    torch.testing.assert_close(grad, 3 * mine**2)
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors

    world(3).on_zero(body)


def test_the_workers_and_the_caller_differentiate_at_the_same_time(world):
    """Each backward waits until all have begun: in sequence they would wait for ever."""

    def body():
        x = torch.ones(3, dtype=torch.float64, requires_grad=True)
        meeting = todist.parallelize(todist.dim_partitioner(0, exclusive=True), todist.sum_reducer)(_meet)
        loss = meeting(x.expand(3, 3) * 1.0)
        started = time.monotonic()
        loss.backward()
        assert time.monotonic() - started < 10
        torch.testing.assert_close(x.grad, torch.full_like(x, 3))

    world(3).on_zero(body)


class _Meet(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        todist.barrier()
        return grad


def _meet(x):
    return _Meet.apply(x).sum()


@pytest.mark.parametrize(
    "function", [torch.tanh, torch.exp, lambda x: torch.exp(x**2)], ids=["tanh", "exp", "nested"]
)
def test_a_result_and_its_recorded_gradient_in_one_backward(world, function):
    """Their graphs on the worker have nodes in common: a gradient penalty, and a third order."""

    def through(call):
        x, _ = vectors()
        y = call(x).sum()
        (slope,) = torch.autograd.grad(y, x, create_graph=True)
        (y + slope.square().sum()).backward()
        penalty, x.grad = x.grad, None
        out = call(x).sum()
        for _ in range(2):
            out = torch.autograd.grad(out, x, create_graph=True)[0].sum()
        out.backward()
        return penalty, x.grad

    def body():
        for here, there in zip(through(function), through(remote(function)), strict=True):
            torch.testing.assert_close(there, here)
        gc.collect()
        assert kept_on(1) == 0

    world(2).on_zero(body)
