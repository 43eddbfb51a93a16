"""RMSprop's one node → the derivatives of its formula, to the second order, however its inputs are connected."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch.autograd import functional, gradcheck, gradgradcheck

import torchopt_dist as todist
from tests.ops import formulas
from tests.ops.cases import needs_kernels
from torchopt_dist.ops._rmsprop import rmsprop

DOUBLE = torch.float64
FUSED = [False, pytest.param(None, marks=needs_kernels)]
fused_or_not = pytest.mark.parametrize("fused", FUSED)
centered_or_not = pytest.mark.parametrize("centered", [False, True])
KINDS = {"none": (0.0, False), "momentum": (0.7, False), "nesterov": (0.7, True)}
kinds = pytest.mark.parametrize("kind", KINDS)
NUMBERS = {"alpha": 0.9, "eps": 0.05}


def numbers(*shapes):
    return [torch.randn(shape, dtype=DOUBLE) for shape in shapes]


@fused_or_not
@centered_or_not
@kinds
@pytest.mark.parametrize("whole", [False, True])
def test_derivatives_of_the_one_node(fused, centered, kind, whole):
    torch.manual_seed(0)
    momentum, nesterov = KINDS[kind]
    columns = {
        "grads": numbers((2,), (3, 1)),
        "square_avgs": [x.square() + 5 for x in numbers((2,), (3, 1))],
        "grad_avgs": numbers((2,), (3, 1)) if centered else None,
        "momentum_buffers": numbers((2,), (3, 1)) if momentum else None,
        "params": numbers((2,), (3, 1)) if whole else None,
    }
    there = [name for name, column in columns.items() if column is not None]
    settings = (momentum, nesterov)

    def compute(*leaves):
        given = {name: list(leaves[2 * i : 2 * i + 2]) for i, name in enumerate(there)}
        options = {"momentum": momentum, "nesterov": nesterov, "lr": 0.3, "fused": fused}
        made = rmsprop(**given, **NUMBERS, **options)
        return tuple(x for column in made for x in column)

    leaves = [x.requires_grad_() for name in there for x in columns[name]]
    got = compute(*leaves)
    factor = -0.3 if whole else 1.0
    rows = zip(*(column or [None, None] for column in columns.values()), strict=True)
    want = zip(*(formulas.rmsprop(*row, factor, 0.9, 0.05, *settings) for row in rows), strict=True)
    for x, y in zip(got, [x for column in want for x in column if x is not None], strict=True):
        torch.testing.assert_close(x, y)
    assert len({x.grad_fn for x in got}) == 1
    assert gradcheck(compute, leaves, check_batched_grad=True)
    assert gradgradcheck(compute, leaves, check_batched_grad=True)


def twice_in_the_list(step, g, v, a):
    (one, two), *_ = step([g, g], [v, v + 1], [a, a * 2])
    return 2 * one + two


def averages_of_the_gradients(step, g, v, a):
    directions, squares, *avgs = step([g], [g * g + 1], [g * 0.5])
    return directions[0] * g + squares[0] + sum(x[0] for x in avgs)


def one_for_all(step, g, v, a):
    results = step([g, g * 2], [g.exp(), v], [g.sin(), g])
    results = step(results[0], results[1], results[2] if len(results) > 2 else [a, a])
    return sum(column[0] * (1 + column[1]) for column in results)


@fused_or_not
@centered_or_not
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("way", [twice_in_the_list, averages_of_the_gradients, one_for_all])
def test_inputs_that_are_connected(fused, centered, create_graph, way):
    """Paths between the inputs are autograd's to follow, and count once."""
    torch.manual_seed(1)
    g = torch.randn(3, dtype=DOUBLE, requires_grad=True)
    v, a = torch.rand(3, dtype=DOUBLE) + 4, torch.rand(3, dtype=DOUBLE)

    def ours(grads, squares, avgs):
        return rmsprop(grads, squares, avgs if centered else None, **NUMBERS, fused=fused)

    def plain(grads, squares, avgs):
        avgs = avgs if centered else [None] * len(grads)
        rows = zip(grads, squares, avgs, strict=True)
        made = [formulas.rmsprop(*row, None, None, 1.0, 0.9, 0.05, 0.0, False) for row in rows]
        return [list(column) for column in zip(*made, strict=True) if column[0] is not None]

    found = []
    for step in (plain, ours):
        made = way(step, g, v, a)
        (slope,) = torch.autograd.grad(made.pow(2).sum(), g, create_graph=create_graph)
        found.append([slope])
        if create_graph:
            found[-1] += torch.autograd.grad(slope.pow(3).sum(), g)
    for got, want in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(got, want)
    assert gradgradcheck(lambda g: way(ours, g, v, a), g)


class Added(torch.nn.Module):
    """Two parameters that only their sum matters of: their gradients are one tensor."""

    def __init__(self):
        super().__init__()
        self.a = torch.nn.Parameter(torch.tensor([0.3, 0.7], dtype=DOUBLE))
        self.b = torch.nn.Parameter(torch.tensor([0.1, -0.2], dtype=DOUBLE))

    def forward(self):
        return ((self.a + self.b) ** 3).sum()


@centered_or_not
@kinds
@pytest.mark.parametrize("create_graph", [False, True])
def test_meta_rmsprop_over_parameters_that_are_added(centered, kind, create_graph):
    """By the kernels, by the formula, by transformations chained, and by finite differences."""
    momentum, nesterov = KINDS[kind]
    options = {"momentum": momentum, "nesterov": nesterov, "centered": centered, "alpha": 0.9, "eps": 1e-2}

    def outer(fused, lr):
        net = Added()
        first = [net.a, net.b]
        optimizer = todist.MetaRMSprop(net, lr=lr, fused=fused, **options)
        for _ in range(3):
            optimizer.step(net())
        return first, net()

    found = []
    learned = torch.tensor(0.05, dtype=DOUBLE)  # a tensor: no node, but a chain
    for fused, lr in ((False, 0.05), (None, 0.05), (False, learned)):
        first, loss = outer(fused, lr)
        slopes = torch.autograd.grad(loss, first, create_graph=create_graph)
        bends = torch.autograd.grad(sum(slopes).pow(2).sum(), first) if create_graph else ()
        found.append([*slopes, *bends])
    for others in found[1:]:
        for got, want in zip(others, found[0], strict=True):
            torch.testing.assert_close(got, want)
    step = 1e-6
    ends = []
    for sign in (1, -1):
        net = Added()
        with torch.no_grad():
            net.a[0] += sign * step
        optimizer = todist.MetaRMSprop(net, lr=0.05, **options)
        for _ in range(3):
            optimizer.step(net())
        ends.append(net().item())
    assert found[0][0][0].item() == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-5)


@fused_or_not
@centered_or_not
@kinds
def test_a_whole_step_is_one_node(fused, centered, kind):
    """All parameters and the whole state have one ``grad_fn``; the layout of the state is that of the chain."""
    momentum, nesterov = KINDS[kind]
    options = {"momentum": momentum, "nesterov": nesterov, "centered": centered, "fused": fused}
    net = torch.nn.Linear(2, 1).double()
    optimizer = todist.MetaRMSprop(net, lr=0.1, **options)
    chained = todist.MetaRMSprop(copy.deepcopy(net), lr=torch.tensor(0.1), **options)
    batch = torch.randn(4, 2, dtype=DOUBLE)
    for each in (optimizer, chained):
        for _ in range(2):
            each.step(each.modules[0](batch).pow(2).sum())
    state = optimizer.state_dict()["state"][0]
    tensors = [*dict(net.named_parameters()).values(), *state.values()]
    assert len({x.grad_fn for x in tensors}) == 1
    assert state.keys() == chained.state_dict()["state"][0].keys()
    assert todist.pytree.flatten(optimizer.get_states())[1] == todist.pytree.flatten(chained.get_states())[1]
    for key, value in chained.state_dict()["state"][0].items():
        torch.testing.assert_close(state[key], value)
    for got, want in zip(net.parameters(), chained.modules[0].parameters(), strict=True):
        torch.testing.assert_close(got, want)


@fused_or_not
@centered_or_not
def test_many_gradients_at_a_time(fused, centered):
    torch.manual_seed(2)
    g, v = torch.randn(3, dtype=DOUBLE, requires_grad=True), torch.rand(3, dtype=DOUBLE) + 4

    def function(g):
        avgs = [g * 0.3, g[0]] if centered else None
        options = {"momentum": 0.5, "nesterov": True, "fused": fused}
        made = rmsprop([g, g.sum()], [v, v[0]], avgs, [g * 2, g[1]], **NUMBERS, **options)
        return made[0][0] + made[0][1] + made[1][0]

    eye = torch.eye(3, dtype=DOUBLE)
    made = function(g)
    want = torch.stack([torch.autograd.grad(made, g, one, retain_graph=True)[0] for one in eye])
    for create_graph in (False, True):
        keep = {"retain_graph": True, "create_graph": create_graph}
        (batched,) = torch.autograd.grad(made, g, eye, is_grads_batched=True, **keep)
        (mapped,) = torch.func.vmap(partial(torch.autograd.grad, made, g, **keep))(eye)
        jacobian = functional.jacobian(function, g, vectorize=True, create_graph=create_graph)
        for got in (batched, mapped, jacobian):
            torch.testing.assert_close(got, want)

    def total(g):
        return function(g).pow(2).sum()

    torch.testing.assert_close(functional.hessian(total, g, vectorize=True), functional.hessian(total, g))
