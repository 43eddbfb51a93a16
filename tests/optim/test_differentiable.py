"""Torch's own optimizers, made differentiable → their values, whatever they are given, and errors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.optim.programs import X, loss_of, make, run, same, values
from tests.optim.torch_classes import CLASSES, FORMS, One, W, trajectory
from tests.rows import each_row
from torchopt_dist.optim import MetaOptimizer
from torchopt_dist.optim.differentiable import differentiable


def test_the_classes_are_found():
    assert {"Adam", "NAdam", "RAdam", "SGD", "Rprop"} <= {cls.__name__ for cls in CLASSES}


@pytest.mark.parametrize(("cls", "options"), FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_values_are_the_plain_optimizers_bit_for_bit(cls, options, dtype):
    net, twin = make(dtype), make(dtype)
    optimizer = differentiable(cls, net, lr=0.01, **options)
    plain = cls(twin.parameters(), lr=0.01, foreach=False, **options)
    for _ in range(20):
        optimizer.step(loss_of(net))
        plain.zero_grad()
        loss_of(twin).backward()
        plain.step()
    assert same(net, twin)
    assert not same(net, make(dtype))


@each_row("shape", [(), (1,)])
@each_row("cls", CLASSES)
def test_a_tensor_of_another_dtype_and_shape_will_do(cls, shape):
    w, lr = torch.tensor(W, dtype=torch.float64), torch.full(shape, 0.05, requires_grad=True)
    moved = trajectory(cls, w.requires_grad_(), 3, lr=lr)
    assert moved.dtype == torch.float64
    assert torch.autograd.grad(moved.sum(), lr)[0].shape == shape
    torch.testing.assert_close(moved, trajectory(cls, w, 3, lr=0.05), rtol=1e-6, atol=1e-6)


@each_row("cls", [torch.optim.Adam, torch.optim.Adamax, torch.optim.SGD])
def test_complex_parameters(cls):
    start = torch.tensor([0.3 + 1j, -0.7 + 0.2j], dtype=torch.complex128)
    one, two = One(start.clone().requires_grad_()), nn.Parameter(start.clone())
    first = one.w
    optimizer, plain = differentiable(cls, one, lr=0.1), cls([two], lr=0.1, foreach=False)
    for _ in range(3):
        optimizer.step((one.w.abs() ** 4).sum())
        plain.zero_grad()
        (two.abs() ** 4).sum().backward()
        plain.step()
    assert torch.equal(one.w.detach(), two.detach())
    assert torch.autograd.grad(one.w.abs().sum(), first)[0].isfinite().all()


@each_row("cls", CLASSES)
def test_frozen_tied_and_unused_parameters(cls):
    net = make()
    net[0].weight.requires_grad_(False)
    frozen = net[0].weight
    net.extra = nn.Linear(3, 3, bias=False)
    net[0].also = net[0].bias
    optimizer = differentiable(cls, net, lr=0.01)

    def loss():
        return net[2](net[1](net[0](X))).square().mean()

    optimizer.step(loss() + net.extra.weight.square().sum())
    extra, state = net.extra.weight, optimizer.get_states()[0]
    optimizer.step(loss())
    assert net[0].weight is frozen
    assert net[0].also is net[0].bias
    assert net[0].bias.grad_fn is not None
    assert net.extra.weight is extra
    now = optimizer.get_states()[0]
    assert now["extra.weight"] is state["extra.weight"]
    assert now["0.weight"] == {}
    assert now["0.bias"] is not state["0.bias"]


def test_a_step_is_recorded_under_no_grad_and_writes_nothing():
    net = make()
    first, before, loss = list(net.parameters()), values(net), loss_of(net)
    with torch.no_grad():
        optimizer = differentiable(torch.optim.Adam, net, lr=0.1)
        optimizer.step(loss)
    state = optimizer.get_states()[0]["0.weight"]
    held = {key: value.detach().clone() for key, value in state.items()}
    run(net, optimizer, 1)
    assert all(torch.equal(state[key], held[key]) for key in held)
    assert all(torch.equal(p, old) for p, old in zip(first, before, strict=True))
    assert all(p.grad is None for p in first)
    net[0].weight.retain_grad()  # reading .grad of a tensor with a history warns without
    assert net[0].weight.grad is None
    assert all(g.abs().sum() > 0 for g in torch.autograd.grad(loss_of(net), first))


def test_two_modules_share_a_step():
    one, two, twin = make(), make(), make()
    optimizer = differentiable(torch.optim.NAdam, one)
    optimizer.add_param_group(two)
    for _ in range(3):
        optimizer.step(loss_of(one) + loss_of(two))
    run(twin, differentiable(torch.optim.NAdam, twin), 3)
    assert same(one, twin)
    assert same(two, twin)
    optimizer.step(loss_of(two))
    assert same(one, twin)
    assert len(optimizer.get_states()) == 2


class Warmed(torch.optim.Adam):
    """A subclass that hands its options on."""

    def __init__(self, params, **kwargs):
        super().__init__(params, **kwargs)


class Unrecorded(torch.optim.Adam):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad)


class Leaky(torch.optim.SGD):
    def __init__(self, params, lr=0.1, ignored=0.0, *, differentiable=False):
        super().__init__(params, lr, differentiable=differentiable)


def test_a_subclass_works():
    net, twin = make(), make()
    optimizer = differentiable(Warmed, net, lr=0.1)
    assert isinstance(optimizer, MetaOptimizer)
    run(net, optimizer, 2)
    run(twin, differentiable(torch.optim.Adam, twin, lr=0.1), 2)
    assert same(net, twin)


@each_row("cls", [torch.optim.LBFGS, torch.optim.SparseAdam, torch.optim.Optimizer])
def test_a_class_that_is_not_differentiable_is_refused(cls):
    with pytest.raises(TypeError, match=f"take `differentiable=`, got {cls.__name__}; .* Adam,.* SGD$"):
        differentiable(cls, make())


def test_bad_input_is_refused():
    net, adam = make(), torch.optim.Adam
    with pytest.raises(TypeError, match="`optimizer_class` must be a class, got an object of Adam"):
        differentiable(adam(net.parameters()), net)
    with pytest.raises(TypeError, match=r"must be a subclass of torch.optim.Optimizer, got Linear"):
        differentiable(nn.Linear, net)
    with pytest.raises(TypeError, match=r"`module` must be a torch.nn.Module, got list"):
        differentiable(adam, list(net.parameters()))
    with pytest.raises(ValueError, match="`module` must have parameters, got Tanh with none"):
        differentiable(adam, nn.Tanh())
    for option in ("differentiable", "foreach", "fused", "capturable"):
        with pytest.raises(TypeError, match=f"`{option}` must be left out"):
            differentiable(adam, net, **{option: True})
    with pytest.raises(TypeError, match="Adam: got an unexpected keyword argument 'momentum'"):
        differentiable(adam, net, momentum=0.9)
    with pytest.raises(TypeError, match="Adam: multiple values for argument 'params'"):
        differentiable(adam, net, params=[])
    with pytest.raises(ValueError, match="Invalid learning rate: -1"):
        differentiable(adam, net, lr=-1.0)
    with pytest.raises(ValueError, match=r"`betas` as a tensor must have one element, got shape \(2,\)"):
        differentiable(adam, net, betas=(torch.ones(2), 0.9))
    with pytest.raises(TypeError, match="must record its step, got Unrecorded"):
        differentiable(Unrecorded, net)
    with pytest.raises(ValueError, match=r"Leaky finds no gradient for \['ignored'\]"):
        differentiable(Leaky, net, ignored=torch.tensor(0.1, requires_grad=True))
    optimizer = differentiable(adam, net)
    stale = loss_of(net)
    optimizer.step(loss_of(net))
    with pytest.raises(ValueError, match="was it computed before the last step"):
        optimizer.step(stale)
    with pytest.raises(ValueError, match=r"`loss` must have one element, got shape \(6, 1\)"):
        optimizer.step(net(X))
