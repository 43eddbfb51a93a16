"""Every row of ``table.py`` → gradients through its steps, of parameters and of hyper-parameters."""

from __future__ import annotations

import inspect

import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck

import torchopt_dist as todist
from tests.optim.graph import count_nodes
from tests.optim.programs import DOUBLE, inner_loss, recorded_grad, unroll
from tests.optim.table import CASES, ROWS
from tests.rows import each_row


@each_row(("name", "setting"), CASES)
def test_first_and_second_derivatives_through_three_steps(name, setting):
    row = ROWS[name]
    options = dict(row.options[setting])
    if "eps" in inspect.signature(row.function).parameters:
        options["eps"] = 0.05  # finite differences must see the bend at 0
    torch.manual_seed(3)
    a, b = (torch.randn(2, dtype=DOUBLE, requires_grad=True) for _ in range(2))

    def after(a, b):
        return tuple(unroll(row, (a, b), options, recorded_grad))

    assert gradcheck(after, (a, b))
    assert gradgradcheck(after, (a, b), atol=1e-4)


@each_row("name", ROWS)
def test_every_hyper_parameter_as_a_tensor_gets_its_gradient(name):
    row = ROWS[name]
    names, numbers = [], []
    for key, value in row.tensors.items():
        for place, number in enumerate(value if isinstance(value, tuple) else (value,)):
            names.append((key, place if isinstance(value, tuple) else None))
            numbers.append(torch.tensor(number, dtype=DOUBLE, requires_grad=True))
    torch.manual_seed(3)
    params = tuple(torch.randn(2, dtype=DOUBLE, requires_grad=True) for _ in range(2))

    def after(*values):
        hyper = {}
        for (key, place), value in zip(names, values, strict=True):
            hyper[key] = value if place is None else (*hyper.get(key, ()), value)
        return tuple(unroll(row, params, hyper, recorded_grad, steps=7 if name == "RAdam" else 3))

    assert len(names) >= 4
    assert gradcheck(after, numbers)
    assert gradgradcheck(after, numbers, atol=1e-4)
    # and the values are those of plain numbers
    want = unroll(row, params, row.tensors, recorded_grad, steps=7 if name == "RAdam" else 3)
    torch.testing.assert_close(after(*numbers), tuple(want), rtol=1e-10, atol=1e-12)


@each_row(("name", "setting"), CASES)
def test_meta_gradients_are_finite_where_an_inner_gradient_is_zero(name, setting):
    row = ROWS[name]
    w = nn.Linear(2, 1, bias=False).double()
    x = torch.tensor([[1.0, 0.0]], dtype=DOUBLE)  # the second weight's gradient is exactly 0
    first = w.weight
    scale = torch.tensor(1.0, dtype=DOUBLE, requires_grad=True)
    optimizer = row.meta(w, **row.options[setting])
    for _ in range(3):
        optimizer.step((scale * w(x)).square().sum())
    gradient, of_scale = torch.autograd.grad(w(x).square().sum() + w.weight[0, 1] ** 2, (first, scale))
    assert gradient.isfinite().all()
    assert of_scale.isfinite()
    decay = row.options[setting].get("weight_decay", 0.01 if name == "AdamW" else 0)
    if not decay and name != "LAMB":  # the second weight stays where it is, and is in no other's norm
        torch.testing.assert_close(gradient[0, 1], 2 * first.detach()[0, 1])


@each_row("name", ROWS)
def test_vmap_and_func_grad(name):
    row = ROWS[name]
    hyper = {**next(iter(row.options.values()))}
    if "eps" in inspect.signature(row.function).parameters:
        hyper["eps"] = 0.05

    def outer(a, b):
        moved = unroll(row, (a, b), hyper, torch.func.grad(inner_loss), steps=7 if name == "RAdam" else 2)
        return sum(p.square().sum() for p in moved)

    torch.manual_seed(5)
    a, b = torch.randn(3, 2, dtype=DOUBLE), torch.randn(3, 2, dtype=DOUBLE)
    batched = torch.func.vmap(torch.func.grad(outer, argnums=(0, 1)))(a, b)
    for task in range(3):
        one = (a[task].clone().requires_grad_(), b[task].clone().requires_grad_())
        moved = unroll(row, one, hyper, recorded_grad, steps=7 if name == "RAdam" else 2)
        want = torch.autograd.grad(sum(p.square().sum() for p in moved), one)
        for got, expected in zip(batched, want, strict=True):
            torch.testing.assert_close(got[task], expected, rtol=1e-9, atol=1e-10)


@each_row("name", ROWS)
def test_the_graph_stays_flat_over_cut_steps(name):
    row = ROWS[name]
    options = list(row.options.values())[-1]
    net = nn.Linear(2, 1, bias=False)
    optimizer = row.meta(net, **options)
    x, sizes = torch.randn(3, 2), []
    for step in range(200):
        optimizer.step(net(x).square().mean())
        if step in (9, 199):
            state = todist.pytree.flatten(optimizer.get_states())[0]
            sizes.append(count_nodes(net.weight, *(t for t in state if isinstance(t, torch.Tensor))))
        todist.stop_gradient(net)
        todist.stop_gradient(optimizer)
    assert sizes[0] == sizes[1] > 0
