"""Learned hyper-parameters: by parameter, by pattern, by entry; the same as logarithms that are written out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchopt_dist as todist
from tests.rows import each_row


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()


X = torch.linspace(-1, 1, 8, dtype=torch.float64).reshape(4, 2)


def loss(net: nn.Module) -> Tensor:
    return (net(X) - 1).square().mean()


FORMS: list[dict[str, Any]] = [
    {"lr": 0.1},
    {"lr": {"2.*": 0.2, "*": 0.1}},
    {"lr": {"*": 0.1}, "weight_decay": {"*.weight": 0.3, "*": 0.1}},
    {"lr": 0.1, "entries": True},
]


@each_row("form", FORMS)
def test_gradients_are_those_of_finite_differences_to_order_2(form: dict[str, Any]) -> None:
    net = network()
    rates = todist.learned(net, **form)
    names = [name for name, _ in rates.named_parameters()]
    points = tuple(rate.detach().clone().requires_grad_() for rate in rates.parameters())

    def outer(*logarithms: Tensor) -> Tensor:
        values = torch.func.functional_call(rates, dict(zip(names, logarithms, strict=True)), ())
        made: Tensor = loss(todist.inner_loop(loss, todist.adamw(**values), net, 3).params)
        return made

    assert torch.autograd.gradcheck(outer, points)
    assert torch.autograd.gradgradcheck(outer, points)


@each_row("adjoint", [todist.Recorded(), todist.Replayed(), todist.FirstOrder()])
def test_a_rate_for_each_parameter_is_what_one_writes_by_hand(adjoint: Any) -> None:
    net = network()
    net[0].bias.requires_grad_(False)
    rates = todist.learned(net, lr=0.1)
    logs = {
        name: torch.tensor(0.1, dtype=torch.float64).log().requires_grad_()
        for name, parameter in net.named_parameters()
        if parameter.requires_grad
    }
    found, wanted = (
        torch.autograd.grad(
            loss(todist.inner_loop(loss, todist.sgd(lr=lr), net, 3, adjoint=adjoint).params), leaves
        )
        for lr, leaves in (
            (rates()["lr"], list(rates.parameters())),
            ({name: log.exp() for name, log in logs.items()}, list(logs.values())),
        )
    )
    torch.testing.assert_close(found, wanted)


def test_all_forms_of_optimizers_take_them() -> None:
    net = network()
    rates = todist.learned(net, lr=0.1, weight_decay=0.01)
    adapted = todist.module_clone(net)
    todist.MetaSGD(adapted, **rates()).step(loss(adapted))
    params = dict(net.named_parameters())
    by_name = todist.learned(params, lr=0.1, weight_decay=0.01)
    functional = todist.FuncOptimizer(todist.sgd(**by_name()))
    moved = functional.step(loss(net), params)
    for name, parameter in adapted.named_parameters():
        torch.testing.assert_close(moved[name], parameter)
    assert all(g is not None for g in torch.autograd.grad(loss(adapted), list(rates.parameters())))


def test_tied_and_frozen_parameters_and_patterns() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1))
    net[1].weight = net[0].weight
    net[2].requires_grad_(False)
    rates = todist.learned(net, lr={"*.weight": 0.5, "[01].bias": 0.25})
    assert {name: rate.item() for name, rate in rates()["lr"].items()} == pytest.approx(
        {"0.weight": 0.5, "0.bias": 0.25, "1.bias": 0.25}
    )
    assert len(list(rates.parameters())) == 2
    todist.inner_loop(lambda net: net(torch.ones(2)).sum(), todist.sgd(**rates()), net, 2)


def test_state_copies_and_text() -> None:
    net = network()
    rates, other = todist.learned(net, lr=0.1), todist.learned(net, lr=0.2)
    assert list(rates.state_dict()) == ["lr:0/weight", "lr:0/bias", "lr:2/weight", "lr:2/bias"]
    other.load_state_dict(rates.state_dict())
    copied = copy.deepcopy(other)
    assert copied()["lr"]["0.bias"].item() == pytest.approx(0.1)
    with torch.no_grad():
        next(copied.parameters()).fill_(0.0)
    assert copied()["lr"]["0.weight"].item() == 1.0
    assert other()["lr"]["0.weight"].item() == pytest.approx(0.1)
    assert "lr:0.weight: 0.1\n" in repr(rates)
    entries = todist.learned(net.half(), lr=0.1, entries=True)
    assert entries()["lr"]["0.weight"].shape == (3, 2)
    assert entries()["lr"]["0.weight"].dtype is torch.float32
    assert "lr:0.weight: about 0.1 in each of 6 entries" in repr(entries)


@each_row(
    ("call", "kind", "told"),
    [
        (
            lambda n: todist.learned(3, lr=0.1),
            TypeError,
            "`model` must be a module or a dictionary of .*, got int 3",
        ),
        (
            lambda n: todist.learned(n),
            ValueError,
            "`lr` or `weight_decay` must be given, else",
        ),
        (
            lambda n: todist.learned(n, lr=0),
            ValueError,
            "`lr` must be above 0, since its logarithm is learned, got 0",
        ),
        (
            lambda n: todist.learned(n, lr=torch.tensor(0.1)),
            TypeError,
            r"`lr` must be a number, or map patterns to numbers, got tensor\(0.1000\)",
        ),
        (
            lambda n: todist.learned(n, weight_decay={"*": "x"}),
            TypeError,
            "`weight_decay` must be a number, or map patterns to numbers, got 'x'",
        ),
        (
            lambda n: todist.learned(n, lr={"3.*": 0.1, "*": 0.1}),
            ValueError,
            "`lr` must have patterns that match a parameter, got '3.*'; the names are 0.weight, 0.bias,",
        ),
        (
            lambda n: todist.learned(n, lr={"2.*": 0.1}),
            ValueError,
            'for each trainable parameter, and none matches 0.weight, 0.bias: let the last one be "*"',
        ),
        (
            lambda n: todist.learned(n, lr={3: 0.1}),
            TypeError,
            "`lr` must have patterns of names for keys, got 3",
        ),
        (
            lambda n: todist.learned(n, lr={"*": 0.1}, entries=True),
            ValueError,
            "`lr` must be a number with entries=True, got patterns",
        ),
        (
            lambda n: todist.learned(n, lr=0.1, entries=1),
            TypeError,
            "`entries` must be True or False, got int 1",
        ),
        (
            lambda n: todist.learned(n.requires_grad_(False), lr=0.1),
            ValueError,
            "`model` must have a trainable parameter, got 4 parameters, all frozen",
        ),
    ],
)
def test_wrong_arguments_are_named(call: Callable[[Any], Any], kind: type[Exception], told: str) -> None:
    with pytest.raises(kind, match=told):
        call(network())
