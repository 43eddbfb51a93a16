"""A worker keeps a graph as long as the caller can use it, and no longer."""

from __future__ import annotations

import gc
import time
import weakref

import psutil
import pytest
import torch
from torch import nn

import torchopt_dist as todist
from tests.distributed.programs import cube, kept_on, remote, vectors
from tests.waits import wait_until
from torchopt_dist.distributed.group.group import current_group


def test_no_grad_and_tensors_without_grad_keep_nothing(world):
    def body():
        x, _ = vectors()
        with torch.no_grad():
            assert not remote(cube)(x).requires_grad
        assert not remote(cube)(x.detach()).requires_grad
        # the module's own flags are kept: a function may differentiate for itself
        with torch.no_grad():
            inner = remote(_own_gradient)(x)
        torch.testing.assert_close(inner, 3 * x.detach() ** 2)
        assert kept_on(1, limit=0) == 0

    world(2).on_zero(body)


def _own_gradient(x):
    assert not torch.is_grad_enabled()
    with torch.enable_grad():
        return torch.autograd.grad(cube(x), x)[0]


def test_a_batch_of_gradients_is_an_error_and_leaves_no_graph(world):
    def body():
        for worker in (0, 1):
            for create_graph in (False, True):
                x, _ = vectors()
                y = remote(torch.exp, worker)(x)
                with pytest.raises(todist.errors.SerializationError, match="is_grads_batched=True"):
                    torch.autograd.grad(
                        y, x, torch.eye(5).double(), is_grads_batched=True, create_graph=create_graph
                    )
                (grad,) = torch.autograd.grad(y.sum(), x)  # nothing is used up
                torch.testing.assert_close(grad, x.exp())
                del y
        gc.collect()
        return kept_on(1)

    assert world(2).on_zero(body) == 0


def test_graphs_are_freed_used_or_not(world):
    def body():
        x, _ = vectors()
        for use in range(30):
            out = remote(cube)(x)
            if use % 3 == 1:
                out.backward(retain_graph=True)
            if use % 3 == 2:
                torch.autograd.grad(out, x, create_graph=True)[0].sum().backward()
        del out
        gc.collect()
        assert kept_on(1) == 0

    world(2).on_zero(body)


def test_a_recorded_backward_that_fails_leaves_no_graph_at_the_caller(world):
    """The engine then never reaches the nodes that take up the other shares' gradients."""

    def body():
        for failing in (0, 1, 2):
            x, _ = vectors()
            spread = todist.parallelize(_one_each, todist.sum_reducer)(_cube_or_error)
            middle = x * 2
            loss = spread(middle, failing).square()
            with pytest.raises(ArithmeticError):
                torch.autograd.grad(loss, x, create_graph=True)
            graph = weakref.ref(loss), weakref.ref(middle)
            del loss, middle
            # A thread that takes up another share's answer may still hold it.
            wait_until(
                lambda graph=graph: gc.collect() >= 0 and not any(tensor() is not None for tensor in graph)
            )
        return kept_on(1), kept_on(2)

    assert world(3).on_zero(body) == (0, 0)


@pytest.mark.parametrize("fails", [0, 1, 2])
@pytest.mark.parametrize("fan_out", [None, 1])
def test_a_backward_that_fails_leaves_nothing_for_the_next_one(world, fails, fan_out):
    """What the engine had yet to do stays in its queue until the thread's next backward, which may never come."""

    def body():
        x = torch.randn(10000, dtype=torch.float64, requires_grad=True)
        (first,) = todist.remote_sync_call(torch.sin, args=(x,), partitioner=1)
        loss = todist.parallelize(_one_each, todist.sum_reducer, fan_out=fan_out)(_cube_or_error)(
            first, fails
        )
        with pytest.raises(ArithmeticError):
            loss.backward()
        del first, loss
        gc.collect()
        streams = current_group().streams
        return len(vars(streams)["_arriving"]), kept_on(1), kept_on(2)

    assert world(3).on_zero(body) == (0, 0, 0)


def test_a_nested_backward_that_fails_on_a_worker_leaves_nothing_there(world):
    def body():
        x, _ = vectors()
        todist.remote_call(_threads_stay, 1)
        (loss,) = todist.remote_sync_call(_fails_before_nested, args=(x,), partitioner=1)
        with pytest.raises(ArithmeticError):
            loss.backward()
        del loss
        gc.collect()
        return kept_on(1), kept_on(2)

    assert world(3).on_zero(body) == (0, 0)


def _threads_stay():
    vars(current_group().threads)["_idle_seconds"] = 60.0


def _fails_before_nested(x):
    (far,) = todist.remote_sync_call(torch.exp, args=(x,), partitioner=2)
    near = far.sin().sum()
    return near + _FailsBackward.apply(far.exp(), True).sum()


@pytest.mark.parametrize("fails", [0, 2])
@pytest.mark.parametrize("waits", [False, True])
def test_an_asynchronous_call_that_fails_leaves_no_graph(world, fails, waits):
    """Torch's futures hold their exceptions where the garbage collector sees none of it."""

    def body():
        def call_and_forget():
            future = todist.parallelize_async(_one_each)(_error_or_cube)(x, fails)
            (own,) = todist.remote_sync_call(cube, args=(x,), partitioner=1)
            assert own.requires_grad
            if waits:
                for _ in range(2):
                    with pytest.raises(ArithmeticError, match="in forward"):
                        future.wait()

        x, _ = vectors()
        call_and_forget()
        time.sleep(0 if waits else 0.5)
        gc.collect()
        return kept_on(1)

    assert world(3).on_zero(body) == 0


def _error_or_cube(x, fails):
    if fails:
        raise ArithmeticError("in forward")
    return cube(x)


def _one_each(x, failing):
    return [(rank, (x, rank == failing), {}) for rank in range(3)]


class _FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, fails):
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.fails:
            raise ArithmeticError("in backward")
        return grad, None


def _cube_or_error(x, fails):
    return cube(_FailsBackward.apply(x, fails))


def _resident():
    gc.collect()
    return psutil.Process().memory_info().rss


@pytest.mark.nightly
def test_memory_stays_flat_over_a_thousand_steps(world):
    def body():
        model = nn.Linear(100, 100, dtype=torch.float64)
        x = torch.randn(8, 100, dtype=torch.float64)
        spread = todist.parallelize(reducer=todist.mean_reducer)(_square_loss)

        def steps(n):
            for step in range(n):
                loss = spread(model, x)
                if step % 2:
                    loss.backward()
                elif step % 4:
                    torch.autograd.grad(loss, tuple(model.parameters()), create_graph=True)

        steps(200)
        before = [_resident(), remote(_resident)()]
        steps(1000)
        after = [_resident(), remote(_resident)()]
        assert kept_on(1) == 0
        # one leaked graph a step would hold 80 kB of weights: 80 MB
        assert max(a - b for a, b in zip(after, before, strict=True)) < 16e6

    world(2).on_zero(body)


def _square_loss(model, x):
    return model(x).square().mean()
