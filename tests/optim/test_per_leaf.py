"""A learning rate for each parameter, or for each of its entries → each moved as by that rate alone."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck

import torchopt_dist as todist
from tests.optim.programs import DOUBLE, loss_of, losses, make, recorded_grad, unroll
from tests.optim.table import ROWS
from tests.rows import each_row
from torchopt_dist.transform import add_decayed_weights


@each_row("name", ROWS)
def test_each_parameter_has_the_steps_of_its_rate(name):
    row = ROWS[name]
    options = {**list(row.options.values())[-1]}
    options.pop("lr")
    rates = {"a": 0.02, "b": torch.tensor([0.05], dtype=DOUBLE)}
    impl, alone = (
        row.function(lr=rates, **options),
        {k: row.function(lr=r, **options) for k, r in rates.items()},
    )
    params = {"a": torch.tensor([1.0, -2.0], dtype=DOUBLE), "b": torch.tensor([0.5], dtype=DOUBLE)}
    apart = {key: [p] for key, p in params.items()}
    state, states = impl.init(params), {key: one.init(apart[key]) for key, one in alone.items()}
    for _ in range(3):
        updates, state = impl.update(
            {k: 2 * p for k, p in params.items()}, state, params=params, inplace=False
        )
        params = todist.apply_updates(params, updates, inplace=False)
        for key, one in alone.items():
            update, states[key] = one.update(
                [2 * apart[key][0]], states[key], params=apart[key], inplace=False
            )
            apart[key] = todist.apply_updates(apart[key], update, inplace=False)
    torch.testing.assert_close({key: [p] for key, p in params.items()}, apart, rtol=1e-12, atol=1e-12)


def test_meta_sgd_learns_a_rate_an_entry():
    """Li et al. 2017, Meta-SGD: after one step ``d loss / d rate`` is minus the product of two gradients."""
    net = make(DOUBLE)
    rates = {name: torch.full_like(p, 0.1).requires_grad_() for name, p in net.named_parameters()}
    before = torch.autograd.grad(loss_of(net), list(net.parameters()))
    todist.MetaSGD(net, lr=rates).step(loss_of(net))
    end = loss_of(net)
    after = torch.autograd.grad(end, list(net.parameters()), retain_graph=True)
    got = torch.autograd.grad(end, list(rates.values()))
    torch.testing.assert_close(got, tuple(-a * b for a, b in zip(before, after, strict=True)))


@pytest.mark.parametrize("name", ["Adam", "Adan"])
def test_derivatives_for_vectors_of_rates(name):
    rates = [
        torch.tensor([0.1, 0.2], dtype=DOUBLE, requires_grad=True),
        torch.tensor(0.3, dtype=DOUBLE, requires_grad=True),
    ]
    torch.manual_seed(3)
    params = tuple(torch.randn(2, dtype=DOUBLE, requires_grad=True) for _ in range(2))
    hyper = {"eps": 0.05, "weight_decay": 0.1}
    assert gradcheck(lambda *lr: tuple(unroll(ROWS[name], params, {**hyper, "lr": lr}, recorded_grad)), rates)


def test_in_place_and_in_a_batch():
    net, twin = make(DOUBLE), make(DOUBLE)
    ours = todist.Optimizer(net.parameters(), todist.adam(lr=[0.1, 0.2, 0.3, 0.4]))
    rates = [0.1, 0.2, 0.3, 0.4]
    theirs = torch.optim.Adam(
        [{"params": [p], "lr": lr} for p, lr in zip(twin.parameters(), rates, strict=True)]
    )
    for loss in losses(DOUBLE, count=4):
        for one, optimizer in ((net, ours), (twin, theirs)):
            optimizer.zero_grad()
            loss(one).backward()
            optimizer.step()
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-10, atol=1e-12)

    def moved(rate):
        clone = todist.module_clone(twin)
        names = [name for name, _ in clone.named_parameters()]
        todist.MetaSGD(clone, lr=dict.fromkeys(names, rate)).step(loss_of(clone))
        return loss_of(clone)

    several = torch.tensor([0.1, 0.2], dtype=DOUBLE)
    torch.testing.assert_close(torch.vmap(moved)(several), torch.stack([moved(rate) for rate in several]))


def test_a_decay_for_each_parameter():
    impl = add_decayed_weights({"a": 0.5, "b": torch.tensor([1.0, 2.0])}, {"a": True, "b": True})
    w = {"a": torch.tensor([2.0]), "b": torch.tensor([1.0, 3.0])}
    updates, _ = impl.update({"a": torch.ones(1), "b": None}, impl.init(w), params=w)
    assert updates["b"] is None
    torch.testing.assert_close(updates["a"], torch.tensor([2.0]))
    updates, _ = impl.update({"a": None, "b": torch.zeros(2)}, impl.init(w), params=w)
    torch.testing.assert_close(updates["b"], torch.tensor([1.0, 6.0]))


def test_rates_that_do_not_fit_are_refused():
    w = {"a": torch.ones(2, 3)}

    def update(lr):
        impl = todist.sgd(lr=lr)
        impl.update(w, impl.init(w), params=w)

    update({"a": torch.ones(2, 1)})
    with pytest.raises(ValueError, match=r"leaf 0 must fit \(2, 3\), got \(2,\)"):
        update({"a": torch.ones(2)})
    with pytest.raises(
        ValueError, match=r"`lr` by name must have a value for each .*: missing: a; unknown: b$"
    ):
        update({"b": 0.1})
    with pytest.raises(ValueError, match="`lr` must have the structure of `params`"):
        update([0.1])
    with pytest.raises(ValueError, match="`lr` must have a value for each parameter, got None at leaf 0"):
        update({"a": None})
    with pytest.raises(ValueError, match=r"`lr\[leaf 0\]` must be at least 0, got -0.1"):
        update({"a": -0.1})
    with pytest.raises(TypeError, match=r"`lr` must be real, got a tensor of torch.complex64 at leaf 0"):
        update({"a": torch.ones(1, dtype=torch.complex64)})
    with pytest.raises(
        TypeError, match="a tensor or a schedule, got str; a tree has a number or a tensor for each"
    ):
        update("much")


@each_row("kind", [dict, torch.nn.ParameterDict])
@each_row("name", ROWS)
def test_frozen_parameters_need_no_rate_and_a_parameter_dict_has_rates(name, kind):
    """Rates of the trainable parameters alone do what rates of all do, also in their gradients."""
    torch.manual_seed(0)
    frozen, net = torch.nn.Linear(2, 2).requires_grad_(False), torch.nn.Linear(2, 1)
    model = torch.nn.ModuleDict({"frozen": frozen, "net": net}) if kind is dict else net
    prefix = "net." if kind is dict else ""
    x = torch.randn(3, 2)

    def loss(m):
        return m["net"](m["frozen"](x)).square().mean() if kind is dict else m(x).square().mean()

    def trained(rates):
        adapted = todist.inner_loop(loss, ROWS[name].function(lr=rates), model, 2).params
        return torch.autograd.grad(loss(adapted), learned)

    learned = [torch.nn.Parameter(torch.tensor(rate)) for rate in (0.02, 0.05)]
    rates = {f"{prefix}{key}": rate for key, rate in zip(("weight", "bias"), learned, strict=True)}
    others = {key: 0.5 for key, p in model.named_parameters() if not p.requires_grad}
    torch.testing.assert_close(trained(kind(rates)), trained({**rates, **others}), rtol=0, atol=0)


def test_missing_rates_are_told_by_name_and_few():
    net = torch.nn.Sequential(*(torch.nn.Linear(1, 1) for _ in range(9)))
    with pytest.raises(
        ValueError, match=r"missing: 0\.bias, 1.bias, 1.weight, 2.bias, 2.weight, and 12 more$"
    ):
        todist.MetaSGD(net, lr={"0.weight": 0.1}).step(net(torch.ones(1, 1)).sum())
