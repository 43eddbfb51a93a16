"""Modules that hold tensors of an earlier call in attributes: the values travel, their graph does not."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import torchopt_dist as todist
from torchopt_dist.distributed.serialization.pickling import pack


class Keeps(nn.Module):
    """Keeps its features in one of the places that a module may choose."""

    def __init__(self, place):
        super().__init__()
        self.a, self.b, self.place = nn.Linear(3, 5), nn.Linear(5, 2), place
        self.kept, self.held, self.scale = None, {"log": []}, torch.tensor(0.5, requires_grad=True)

    def forward(self, x):
        features = torch.tanh(self.a(x))
        if self.place == "attribute":
            self.kept = features
        elif self.place == "container":
            self.held["log"] = [features]
        else:
            self.b.kept = features
        return self.b(features) * self.scale


def weight_norm():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's new one is a parametrization
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 5)), nn.Tanh(), nn.Linear(5, 2))


MODULES = {
    "weight_norm": weight_norm,
    "spectral_norm": lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(3, 5)), nn.Linear(5, 2)).eval(),
    **{place: lambda place=place: Keeps(place) for place in ("attribute", "container", "part")},
}


def task_loss(model, x):
    clone = todist.module_clone(model)
    inner = todist.MetaSGD(clone, lr=0.1)
    inner.step(clone(x).square().mean())
    return (clone(x) - 1).square().mean()


def shared(model, other, x):
    return task_loss(model, x) + other.sum()


def trained(model, losses, steps=2):
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(4, 3).double()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = losses(model)
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return seen


def made(name):
    torch.manual_seed(0)
    return MODULES[name]().double()


def test_trained_here_and_there_as_here_alone(world):
    def body():
        x = torch.arange(24.0, dtype=torch.float64).reshape(2, 4, 3) / 10
        spread = todist.parallelize(
            todist.dim_partitioner(exclusive=True, keepdim=False), todist.mean_reducer
        )
        for name in MODULES:
            here = trained(made(name), lambda m: torch.stack([task_loss(m, one) for one in x]).mean())
            there = trained(made(name), lambda m: spread(task_loss)(m, x))
            assert there == pytest.approx(here, rel=1e-10), name
        # a tensor that is an argument, too, is connected as such
        model, grads = made("attribute"), []
        for call in (todist.remote_sync_call, lambda f, args, partitioner: [f(*args)]):
            model(x[0])
            loss = call(shared, args=(model, model.kept, x[0]), partitioner=1)[0]
            grads.append(torch.autograd.grad(loss, model.a.weight)[0])
        torch.testing.assert_close(*grads)

    world(2).on_zero(body)


def test_parameters_and_leaves_stay_connected():
    """A moved clone's parameters have a graph; a leaf has none that could be used up."""
    model = todist.module_clone(Keeps("attribute"))
    todist.MetaSGD(model, lr=0.1).step(model(torch.ones(1, 3)).sum())
    model(torch.ones(1, 3))
    sent = {id(tensor) for tensor in pack(model, main_by_name=True).tensors}
    assert {id(tensor) for tensor in (*model.parameters(), model.scale)} <= sent
    assert id(model.kept) not in sent
    values = [tensor for tensor in pack(model, main_by_name=True).tensors if tensor.shape == model.kept.shape]
    assert any(torch.equal(value, model.kept) and not value.requires_grad for value in values)
