"""``MetaOptimizer`` inside ``vmap`` → the values and gradients of a loop over the samples."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchopt_dist as todist
from tests.optim.programs import drawn
from tests.optim.table import ROWS
from tests.rows import each_row

X = drawn(6, 8, 3, seed=0, dtype=torch.float64)
Y = X.sum(2, keepdim=True).sin()


def make():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    net[0].bias.requires_grad_(False)
    return net


def adapted_loss(net, make_optimizer, x, y):
    net = todist.module_clone(net)
    inner = make_optimizer(net)
    for _ in range(3):
        inner.step(F.mse_loss(net(x[:4]), y[:4]))
    return F.mse_loss(net(x[4:]), y[4:])


def clipped(net):
    return todist.MetaOptimizer(net, todist.chain(todist.transform.clip_grad_norm(0.1), todist.adam(0.05)))


def hooked(net):
    double = todist.transform.register_hook(_doubled_where_it_sums_to_less_than_zero)
    return todist.MetaOptimizer(net, todist.chain(double, todist.sgd(0.1)))


def _doubled_where_it_sums_to_less_than_zero(grad):
    return torch.where(grad.sum() < 0, 2 * grad, grad)


OPTIMIZERS = {
    "hooked": hooked,
    **{
        name: lambda net, row=row: row.meta(net, **row.options["defaults"])
        for name, row in ROWS.items()
        if name != "SGD"
    },
    "momentum": lambda net: todist.MetaSGD(net, 0.05, momentum=0.9),
    "clipped": clipped,
    "differentiable": lambda net: todist.differentiable(torch.optim.SGD, net, lr=0.05, momentum=0.9),
}


@each_row("name", OPTIMIZERS)
def test_a_batch_of_inner_loops_equals_a_loop_over_them(name):
    net = make()
    params = [p for p in net.parameters() if p.requires_grad]

    def task(x, y):
        return adapted_loss(net, OPTIMIZERS[name], x, y)

    one_by_one = torch.stack([task(x, y) for x, y in zip(X, Y, strict=True)])
    weights = torch.arange(1.0, 7.0, dtype=torch.float64)
    want = torch.autograd.grad(one_by_one @ weights, params)
    nested = torch.vmap(torch.vmap(task))(X.reshape(2, 3, 8, 3), Y.reshape(2, 3, 8, 1)).flatten()
    for batched in (torch.vmap(task)(X, Y), nested):
        torch.testing.assert_close(batched, one_by_one, rtol=1e-9, atol=1e-12)
        got = torch.autograd.grad(batched @ weights, params)
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-9)


@each_row("way", ["stop_gradient", "snapshot", "deepcopy", "tree"])
def test_a_graph_that_is_cut_inside_vmap_is_cut_as_in_a_loop(way):
    net = make()
    params = [p for p in net.parameters() if p.requires_grad]

    def task(x, y):
        clone = todist.module_clone(net)
        inner = todist.MetaAdam(clone, lr=0.1)
        for step in range(3):
            inner.step(F.mse_loss(clone(x), y))
            if step == 1 and way == "stop_gradient":
                todist.stop_gradient(clone)
                todist.stop_gradient(inner)
            if step == 0 and way == "snapshot":
                snapshot = todist.extract_state_dict(clone, by="deepcopy")
            if step == 2 and way == "snapshot":
                todist.recover_state_dict(clone, snapshot)
                inner.step(F.mse_loss(clone(x), y))
            if step == 1 and way == "deepcopy":
                inner = copy.deepcopy(inner)
                (clone,) = inner.modules
            if step == 1 and way == "tree":
                todist.stop_gradient(dict(clone.named_parameters()))
        # with a term that does not come by the cut parameters
        return F.mse_loss(clone(x), y), net[0].weight.sum() * F.mse_loss(clone(x), y)

    rows = [task(x, y) for x, y in zip(X, Y, strict=True)]
    one_by_one = [torch.stack(column) for column in zip(*rows, strict=True)]
    batched = torch.vmap(task)(X, Y)
    torch.testing.assert_close(batched, tuple(one_by_one), rtol=1e-9, atol=1e-12)
    grads = (
        torch.autograd.grad(sum(map(torch.sum, losses)), params, allow_unused=True)
        for losses in (batched, one_by_one)
    )
    torch.testing.assert_close(*grads, rtol=1e-8, atol=1e-10)


def test_a_learned_rate_gets_the_gradient_of_all_samples():
    net, lr = make(), torch.tensor(0.05, dtype=torch.float64, requires_grad=True)

    def task(x, y):
        return adapted_loss(net, lambda net: todist.MetaSGD(net, lr), x, y)

    want = torch.autograd.grad(sum(task(x, y) for x, y in zip(X, Y, strict=True)), lr)
    got = torch.autograd.grad(torch.vmap(task)(X, Y).sum(), lr)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_parameters_of_their_own_may_come_from_outside():
    """Samples with parameters along another dimension than the first, moved by a ``FuncOptimizer``."""
    first = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)

    def task(w, x, y):
        optimizer = todist.FuncOptimizer(todist.adam(0.1))
        for _ in range(2):
            (w,) = optimizer.step(((x @ w - y[:, 0]) ** 2).mean(), (w,))
        return ((x @ w - y[:, 0]) ** 2).mean()

    one_by_one = torch.stack([task(first[:, i], X[i], Y[i]) for i in range(6)])
    batched = torch.vmap(task, in_dims=(1, 0, 0))(first, X, Y)
    torch.testing.assert_close(batched, one_by_one)
    grads = (torch.autograd.grad(losses.square().sum(), first) for losses in (batched, one_by_one))
    torch.testing.assert_close(*grads)


def test_samples_without_parameters_of_their_own_are_refused():
    net = make()
    inner = todist.MetaSGD(net, 0.1)
    with pytest.raises(ValueError, match="make the MetaOptimizer inside the function that `vmap` maps"):
        torch.vmap(lambda x: inner.step(net(x).square().mean()))(X)

    def too_early(x):
        clone = todist.module_clone(net)
        loss = clone(x).square().mean()
        todist.MetaSGD(clone, 0.1).step(loss)

    with pytest.raises(
        ValueError, match=r"inside `vmap`, make the MetaOptimizer inside .* and the loss after it"
    ):
        torch.vmap(too_early)(X)
