"""The README's ``task_loss``, which adapts a model inside: in one ``vmap`` a worker, and without gradients."""

from __future__ import annotations

import torch
from torch.nn import functional as F

import torchopt_dist as todist
from tests.distributed.programs import gradients

BY_TASK = todist.dim_partitioner(exclusive=True, keepdim=False)


def task_loss(model, x, y):
    model = todist.module_clone(model)
    inner = todist.MetaSGD(model, lr=0.05)
    for _ in range(3):
        inner.step(F.mse_loss(model(x[:10]), y[:10]))
    return F.mse_loss(model(x[10:]), y[10:])


def setting():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(1, 40), torch.nn.Tanh(), torch.nn.Linear(40, 1)).double()
    x = 6 * torch.rand(5, 20, 1, dtype=torch.float64) - 3
    return net, x, torch.sin(x)


def test_a_function_that_adapts_runs_vectorized_and_without_gradients(world):
    def body():
        model, x, y = setting()
        want = torch.stack([task_loss(model, *task) for task in zip(x, y, strict=True)]).mean()
        grads = gradients(want, model)
        for vectorize in (False, True):
            spread = todist.parallelize(BY_TASK, todist.mean_reducer, vectorize=vectorize)(task_loss)
            loss = spread(model, x, y)
            torch.testing.assert_close(loss, want, rtol=1e-12, atol=0)
            torch.testing.assert_close(gradients(loss, model), grads, rtol=1e-10, atol=1e-12)
            for context in (torch.no_grad, torch.inference_mode):
                with context():
                    value = spread(model, x.clone(), y.clone())
                    assert not value.requires_grad
                    assert not torch.is_grad_enabled()
                torch.testing.assert_close(value.clone(), want.detach(), rtol=1e-12, atol=0)

    world(2).on_zero(body)


def functional_loss(first, x, y):
    optimizer = todist.FuncOptimizer(todist.adam(lr=0.05))
    (w,) = first
    for _ in range(2):
        (w,) = optimizer.step(F.mse_loss(x[:10] * w, y[:10]), (w,))
    return F.mse_loss(x[10:] * w, y[10:])


def test_a_functional_optimizer_takes_gradients_there_too():
    @todist.auto_init_rpc()
    def values():
        _, x, y = setting()
        first = [torch.ones(1, dtype=torch.float64, requires_grad=True)]
        spread = todist.parallelize(BY_TASK, todist.stack_reducer)(functional_loss)
        want = spread(todist.replicated(first), x, y)
        with torch.no_grad():
            got = spread(todist.replicated(first), x, y)
        return got, want

    got, want = values()
    assert want.requires_grad
    assert not got.requires_grad
    torch.testing.assert_close(got, want.detach(), rtol=1e-12, atol=0)


def test_a_task_is_begun_anew_where_it_adapts_and_only_there(world):
    def task(model, x, y):
        noise = torch.randn(())
        model = todist.module_clone(model)
        first = F.mse_loss(model(x), y)  # before the optimizer is made
        todist.MetaSGD(model, lr=0.05).step(first)
        return F.mse_loss(model(x), y) + noise

    def body():
        model, x, y = setting()
        values = []
        for grad in (True, False):
            torch.manual_seed(3)
            with torch.set_grad_enabled(grad):
                values.append(todist.parallelize(BY_TASK, todist.mean_reducer)(task)(model, x, y).detach())
        torch.testing.assert_close(*values, rtol=1e-12, atol=0)

        with torch.no_grad():
            return todist.remote_sync_call(torch.is_grad_enabled, partitioner=1)

    assert world(2).on_zero(body) == [False]
