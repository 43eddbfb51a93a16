"""Optimizers whose step depends on the values of their state: a replay finds all that may have a gradient."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import torchopt_dist as todist
from tests.diff.replays import D, agree, both
from tests.rows import each_row
from torchopt_dist import pytree
from torchopt_dist.diff.adjoints._places import state_places
from torchopt_dist.transform import multi_steps, register_hook


class SlowState(NamedTuple):
    count: Any
    slow: Any


def begin(params):
    return SlowState(torch.zeros((), dtype=torch.int64), pytree.map_tensors(torch.clone, params))


def every_third(updates, state, *, params=None, inplace=False):
    """As lookahead [Zhang et al. 2019]: every third step goes half of the way from the last such one."""
    if int(state.count) % 3 < 2:
        return updates, SlowState(state.count + 1, state.slow)
    slow = pytree.tree_map(
        lambda s, p, u: s if u is None else s + 0.5 * (p + u - s), state.slow, params, updates
    )
    back = pytree.tree_map(lambda s, p, u: None if u is None else s - p, slow, params, updates)
    return back, SlowState(state.count + 1, slow)


class TrustState(NamedTuple):
    trust: Any
    count: Any


def trusting(params):
    return TrustState(torch.ones((), dtype=D), torch.zeros((), dtype=torch.int64))


def scaled_by_trust(updates, state, *, params=None, inplace=False):
    """Every third step chooses the factor of the next ones: a number beside trees of tensors, one a parameter."""
    scaled = pytree.tree_map(lambda u: None if u is None else u * state.trust, updates)
    trust = state.trust
    if int(state.count) % 3 == 2:
        trust = 1 / (1 + sum(u.square().sum() for u in pytree.flatten(updates)[0] if u is not None))
    return scaled, TrustState(trust, state.count + 1)


OPTIMIZERS = {
    "momentum": multi_steps(todist.sgd(lr=0.05, momentum=0.9), 2),
    "adam": todist.chain(
        todist.transform.clip_grad_norm(0.5), multi_steps(todist.adam(lr=0.05, eps=0.01), 3)
    ),
    "lookahead": todist.chain(
        todist.sgd(lr=0.05), todist.transform.GradientTransformation(begin, every_third)
    ),
}


def twice(gradient):
    return 2 * gradient


def parts(frozen):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(D)
    net[0].bias.requires_grad_(not frozen)
    weights = torch.rand(5, dtype=D, requires_grad=True)
    return net, weights, torch.randn(7, 5, 3, dtype=D)


@each_row("adjoint", [todist.Replayed(), todist.Replayed(snapshots=2)])
@each_row("frozen", [False, True])
@each_row("name", OPTIMIZERS)
def test_a_state_that_only_some_steps_change_has_its_gradient(name, frozen, adjoint):
    net, weights, xs = parts(frozen)
    ins = [weights, *(p for p in net.parameters() if p.requires_grad)]

    def loss(net, x):
        return (weights * net(x).squeeze(1) ** 2).mean()

    agree(both(loss, net, xs, ins=ins, optimizer=OPTIMIZERS[name], replayed=adjoint, meta=weights))


@each_row("name", OPTIMIZERS)
def test_and_inside_vmap(name):
    net, weights, xs = parts(frozen=True)
    ins = [weights, *(p for p in net.parameters() if p.requires_grad)]

    def outer(x, adjoint):
        def loss(net, number):
            return (weights * net(x).squeeze(1) ** 2).mean()

        options = {"meta": weights, "adjoint": adjoint, "seed": 0}
        made = todist.inner_loop(loss, OPTIMIZERS[name], net, range(3), **options)
        options["state"] = made.state
        made = todist.inner_loop(loss, OPTIMIZERS[name], made.params, range(4), **options)
        return sum((p**3).sum() for p in made.params.parameters())

    one_by_one = sum(outer(x, todist.Recorded()) for x in xs[:2])
    at_once = torch.vmap(lambda x: outer(x, todist.Replayed()))(xs[:2]).sum()
    agree([torch.autograd.grad(value, ins) for value in (at_once, one_by_one)])


def test_a_hook_in_vmap_is_left_out_where_nothing_is_recorded():
    w = torch.ones(2, dtype=D, requires_grad=True)
    impl = todist.chain(register_hook(twice), todist.sgd(lr=0.1))

    def outer(x, adjoint):
        return todist.inner_loop(
            lambda w: (w * x).square().sum(), impl, w, 2, meta=x, adjoint=adjoint
        ).params.sum()

    xs = torch.randn(2, 2, dtype=D)
    values = [
        torch.vmap(lambda x, one=one: outer(x, one))(xs).sum()
        for one in (todist.Replayed(), todist.Recorded())
    ]
    agree([torch.autograd.grad(value, w) for value in values])


def of_tensors_only(params):
    """Does not take ``None`` for a parameter."""
    return TrustState(torch.ones((), dtype=D), torch.zeros_like(params[0].sum(), dtype=torch.int64))


@each_row("init", [trusting, of_tensors_only])
def test_a_number_of_the_state_is_not_taken_for_one_of_a_frozen_parameter(init):
    """Frozen is the first parameter of a list, and the number is the first one of the state."""
    frozen = torch.tensor(0.3, dtype=D)
    w, target = (torch.tensor(x, dtype=D, requires_grad=True) for x in ([0.5, 0.7], [1.0, 2.0]))
    optimizer = todist.chain(
        todist.transform.GradientTransformation(init, scaled_by_trust), todist.sgd(lr=0.1)
    )

    def found(adjoint):
        def loss(params):
            return (params[0] * target - params[1]).square().sum()

        made = todist.inner_loop(loss, optimizer, [frozen, w], 6, meta=target, adjoint=adjoint)
        return torch.autograd.grad(made.params[1].square().sum(), (target, w))

    agree([found(adjoint) for adjoint in (todist.Replayed(), todist.Recorded())])


@pytest.mark.parametrize("optimizer", [todist.adam(lr=0.1), multi_steps(todist.adam(lr=0.1), 2)])
def test_nothing_is_carried_for_the_averages_of_a_frozen_parameter(monkeypatch, optimizer):
    seen = []

    def watched(loop):
        leaves = pytree.flatten(loop.first.state)[0]
        seen.extend(leaves[place].shape for place in state_places(loop))
        return state_places(loop)

    monkeypatch.setattr("torchopt_dist.diff.replay.state_places", watched)
    params = {"frozen": torch.ones(3), "moved": torch.ones(2, requires_grad=True)}
    todist.inner_loop(
        lambda p: (p["moved"].sum() * p["frozen"]).sum(), optimizer, params, 2, adjoint=todist.Replayed()
    )
    assert (2,) in seen
    assert (3,) not in seen
    assert len(seen) <= 4  # of the moved one: two averages, a sum of gradients and a count
