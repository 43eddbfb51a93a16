"""What fails in the backward of a remote call, and what cannot be connected, is a clear error."""

from __future__ import annotations

import os
import warnings

import pytest
import torch
from torch.autograd.function import once_differentiable

import torchopt_dist as todist
from tests.distributed.programs import cube, remote, vectors
from tests.waits import say


def test_an_error_in_backward_is_the_workers_own(world):
    def body():
        x, _ = vectors()
        out = remote(_broken)(x)
        with pytest.raises(ZeroDivisionError, match="in backward") as caught:
            out.backward()
        assert isinstance(caught.value, todist.RemoteError)
        assert caught.value.worker == "worker1"

    world(2).on_zero(body)


class _Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ZeroDivisionError("in backward")


def _broken(x):
    return _Broken.apply(x).sum()


def test_what_must_not_be_differentiated_twice_is_an_error(world):
    """A worker differentiates for the tensors of the call, which torch's own refusal is not behind."""

    def body():
        x, _ = vectors()
        once = "differentiate twice a function that was marked with @once_differentiable"
        for worker in (0, 1):
            torch.testing.assert_close(torch.autograd.grad(remote(_once, worker=worker)(x), x)[0], 3 * x**2)
            value = remote(_stepped, worker=worker)(x)
            with pytest.raises(RuntimeError, match=once):
                value.backward()
            (gradient,) = torch.autograd.grad(remote(_once, worker=worker)(x), x, create_graph=True)
            with pytest.raises(RuntimeError, match=f"{once}, `_Once`"):
                torch.autograd.grad(gradient.sum(), x)

    world(2).on_zero(body)


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return 3 * ctx.saved_tensors[0] ** 2 * grad


def _once(x):
    return _Once.apply(x).sum()


def _stepped(x):
    (gradient,) = torch.autograd.grad((_Once.apply(x) ** 2).sum(), x, create_graph=True)
    return ((x - 0.1 * gradient) ** 2).sum()


def test_what_cannot_be_connected_is_an_error(world):
    def body():
        x, _ = vectors()
        with pytest.raises(todist.errors.SerializationError, match="only dense tensors"):
            remote(cube)(torch.eye(3).to_sparse().requires_grad_())
        with pytest.raises(todist.errors.SerializationError, match=r"torch\.func"):
            torch.func.grad(remote(cube))(x)
        with pytest.raises(todist.errors.SerializationError, match=r"inside a torch\.func transform"):
            torch.func.vmap(remote(cube))(torch.ones(2, 3))
        rows = torch.randn(2, 3)
        with pytest.raises(todist.errors.SerializationError, match=r"inside a torch\.func transform"):
            torch.func.vmap(remote(cube, worker=0))(rows)
        module = torch.nn.Linear(3, 1)  # takes no part
        for worker in (0, 1):
            for transform in (torch.func.grad, torch.func.vmap):
                with pytest.raises(todist.errors.SerializationError, match=r"inside a torch\.func transform"):
                    transform(lambda x, to=worker: (x * _first(module, 2.0, to)).sum())(torch.ones(3))
        plain = todist.parallelize(0, todist.sum_reducer, isolate_own_share=False)(cube)
        torch.testing.assert_close(torch.func.vmap(plain)(rows), (rows**3).sum(1))
        with (
            torch.autograd.forward_ad.dual_level(),
            pytest.raises(todist.errors.SerializationError, match="forward-mode"),
        ):
            remote(cube)(torch.autograd.forward_ad.make_dual(x.detach(), torch.ones_like(x)))

    def quiet():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, from make_dual and sparse tensors
            body()

    world(2).on_zero(quiet)


def _first(module, number, worker):
    return todist.remote_sync_call(_second, args=(module, number), partitioner=worker)[0]


def _second(module, number):
    return number


def test_a_worker_lost_in_backward_is_an_error(world, tmp_path):
    def body():
        x, _ = vectors()
        out = remote(_deadly)(x)
        with pytest.raises(todist.WorkerLostError):
            out.backward()
        say(tmp_path / "caught")

    endings = world(2).endings(lambda: body() if todist.get_rank() == 0 else None)
    assert (tmp_path / "caught").exists()
    assert endings[1].exitcode == 7
    assert isinstance(endings[0].error, todist.WorkerLostError)  # at the end: the worker is missing


class _Deadly(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):

        os._exit(7)


def _deadly(x):
    return _Deadly.apply(x).sum()
