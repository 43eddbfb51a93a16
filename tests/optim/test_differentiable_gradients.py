"""Torch's own optimizers, made differentiable → the gradients through their steps, to order two."""

from __future__ import annotations

import inspect

import pytest
import torch

from tests.optim.programs import loss_of, make, run
from tests.optim.torch_classes import CLASSES, FORMS, One, W, takes, trajectory
from tests.rows import each_row
from torchopt_dist.optim import MetaSGD
from torchopt_dist.optim.differentiable import differentiable

SMOOTH = [cls for cls in CLASSES if cls is not torch.optim.Rprop]
# What an option is worth in the check of its gradient: so that it tells on the outcome within a few steps.
VALUES = {
    "lr": 0.05,
    "eps": 0.1,
    "weight_decay": 0.1,
    "initial_accumulator_value": 0.3,
    "betas": (0.7, 0.9),
    "rho": 0.8,
    "alpha": 0.7,
    "lambd": 0.1,
    "momentum": 0.5,
    "dampening": 0.3,
    "lr_decay": 0.2,
    "momentum_decay": 0.1,
    "etas": (0.5, 1.2),
}

LATE = {torch.optim.Adamax: 7, torch.optim.RAdam: 7}
"""The steps that these take until all their options tell: RAdam's rectification begins at the sixth."""


@pytest.fixture
def doubles():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # torch keeps its counters and rates in the default dtype
    yield
    torch.set_default_dtype(before)


@each_row(("cls", "options"), FORMS)
def test_gradients_through_three_steps_to_order_two(doubles, cls, options):
    w = torch.tensor(W, requires_grad=True)

    def moved(w):
        return trajectory(cls, w, 3, lr=0.05, **options)

    assert torch.autograd.gradcheck(moved, w)
    assert torch.autograd.gradgradcheck(moved, w)


def test_rprop_moves_by_signs_so_that_only_the_identity_is_left():
    w = torch.tensor(W, requires_grad=True)
    moved = trajectory(torch.optim.Rprop, w, 3, lr=0.05)
    jacobian = torch.stack([torch.autograd.grad(moved[i], w, retain_graph=True)[0] for i in range(3)])
    assert torch.equal(jacobian, torch.eye(3))


@pytest.mark.parametrize("cls", CLASSES)
def test_options_given_as_tensors_get_their_gradients(doubles, cls):
    names = [name for name in inspect.signature(cls).parameters if name in VALUES]
    pairs = {name: VALUES[name] if name in ("betas", "etas") else (VALUES[name],) for name in names}
    flat = [value for pair in pairs.values() for value in pair]
    tensors = [torch.tensor(v, requires_grad=True) for v in flat]
    w = torch.tensor(W[:2], requires_grad=True)
    steps = LATE.get(cls, 4)

    def moved(w, *tensors):
        rest = iter(tensors)
        options = {
            name: (next(rest), next(rest)) if name in ("betas", "etas") else next(rest) for name in names
        }
        return trajectory(cls, w, steps, **options)

    assert "lr" in names
    assert torch.autograd.gradcheck(moved, (w, *tensors))
    assert torch.autograd.gradgradcheck(moved, (w, *tensors))
    gradients = torch.autograd.grad(moved(w, *tensors).sum(), tensors)
    still = {"alpha"} if cls is torch.optim.ASGD else set()  # its decay of lr is second order in lambd
    of = [name for name, pair in pairs.items() for _ in pair]
    assert all(g != 0 for g, name in zip(gradients, of, strict=True) if name not in still)
    plain = iter(flat)
    numbers = {n: (next(plain), next(plain)) if n in ("betas", "etas") else next(plain) for n in names}
    torch.testing.assert_close(moved(w, *tensors), trajectory(cls, w, steps, **numbers))


@each_row(
    ("cls", "name"),
    [
        (cls, name)
        for cls in CLASSES
        for name in ("lr", "weight_decay", "momentum")
        if takes(cls, name)
        and (cls, name) != (torch.optim.Rprop, "lr")  # it clamps its first step size from below
    ],
)
def test_an_option_may_be_zero_and_is_not_left_out(doubles, cls, name):
    w, option = torch.tensor(W, requires_grad=True), torch.tensor(0.0, requires_grad=True)
    options = {"lr": 0.05, name: option}
    assert torch.autograd.gradcheck(lambda o: trajectory(cls, w, 3, **{**options, name: o}), (option,))
    (gradient,) = torch.autograd.grad(trajectory(cls, w, 3, **options).sum(), option)
    assert gradient != 0


def test_making_an_optimizer_leaves_the_graph_behind_a_rate_alone():
    log = torch.tensor(-3.0, requires_grad=True)
    lr = log.exp()
    moved = trajectory(torch.optim.Adam, torch.tensor(W, requires_grad=True), 2, lr=lr)
    (gradient,) = torch.autograd.grad(moved.sum(), log)
    assert gradient != 0


@each_row("cls", SMOOTH)
def test_where_a_gradient_is_zero_the_derivative_is_the_limit(doubles, cls):
    def slope(at):
        w = torch.full((1,), at, requires_grad=True)
        module = One(w.clone())
        optimizer = differentiable(cls, module, lr=0.05, **({"eps": 0.1} if takes(cls, "eps") else {}))
        for _ in range(3):
            optimizer.step((module.w**2).sum() / 2)
        (first,) = torch.autograd.grad(module.w, w, create_graph=True)
        # SGD's slope is a constant: then there is nothing to differentiate
        second = torch.autograd.grad(first, w)[0] if first.requires_grad else torch.zeros(1)
        return first.detach(), second

    (at_zero, curvature), (left, _), (right, _) = slope(0.0), slope(-1e-7), slope(1e-7)
    torch.testing.assert_close(at_zero, left, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(at_zero, right, rtol=1e-5, atol=1e-5)
    assert curvature.isfinite().all()


def test_torchs_own_differentiable_adam_gives_nan_there():
    w = torch.zeros(1, requires_grad=True)
    p = w.clone()
    p.grad = w * 1
    torch.optim.Adam([p], differentiable=True).step()
    assert torch.autograd.grad(p, w)[0].isnan()


@each_row(
    "options",
    [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "dampening": 0.4, "weight_decay": 0.1},
        {"momentum": 0.9, "nesterov": True},
    ],
)
def test_sgd_equals_metasgd_in_values_and_gradients(options):
    results = []
    for make_optimizer in (
        lambda net, lr: differentiable(torch.optim.SGD, net, lr=lr, **options),
        lambda net, lr: MetaSGD(net, lr, **options),
    ):
        net, lr = make(torch.float64), torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
        first = list(net.parameters())
        run(net, make_optimizer(net, lr), 4)
        loss = loss_of(net)
        results.append([loss.detach(), *torch.autograd.grad(loss, [lr, *first])])
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two)
