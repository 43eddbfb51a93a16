"""The kernels of the gradients of Adam's and RMSprop's formulas → what autograd makes of these, edges included."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.ops.cases import kernels, needs_kernels
from tests.ops.formulas import adam, adam_gradients, at_least_zero, rmsprop, rmsprop_gradients
from tests.rows import each_row

pytestmark = needs_kernels


EDGES = [
    0.0,
    -0.0,
    5e-324,
    1e-310,
    1e-300,
    1e-160,
    1e-30,
    1.0,
    -2.0,
    1e30,
    1e160,
    math.inf,
    -math.inf,
    math.nan,
]


def edges(count: int) -> list[Tensor]:
    """Every combination of the edges, a tensor for each place."""
    return list(torch.cartesian_prod(*[torch.tensor(EDGES, dtype=torch.float64)] * count).unbind(-1))


def assert_same_edges(got: list[Tensor], expected: tuple, scale: Tensor | float = 0.0) -> None:
    """To the last digits, denormals among them; NaN or infinite at the same places.

    Args:
        got: what the kernel makes.
        expected: what autograd makes.
        scale: the size of the terms that the first one of these is the sum of; its own, if they do not cancel out.
    """
    for place, (tensor, value) in enumerate(zip(got, expected, strict=True)):
        assert torch.equal(tensor.isfinite(), value.isfinite())
        size = value.abs() + (scale if place == 0 else 0.0)
        near = (tensor - value).abs() <= 1e-12 * size + 1e-323
        assert near[value.isfinite()].all()


@each_row("eps_root", [0.0, 1e-3])
def test_adam_backward_at_the_edges_is_autograd(eps_root):
    du, g, m, v = edges(4)
    keep = ~(v < 0)
    du, g, m, v = du[keep], g[keep], m[keep], v[keep]
    c, settings = torch.tensor([[0.1, 0.01]], dtype=torch.float64), (1.0, 1.0, 0.9, 0.99, 1e-8, eps_root)
    got = kernels.adam_backward([du], [], [], [g], [m], [v], [], c, *settings, 0.0, False)
    expected = adam_gradients(du, None, None, g, m, v, None, c[0], *settings)
    assert_same_edges(got[1:], expected[1:3])
    # A large gradient moves both averages so that the direction stays: the two terms cancel, and are the measure.
    terms = (expected[1] * 0.1 / 0.9).abs() + (expected[2] * 0.01 / 0.99 * 2 * g).abs()
    assert torch.equal(got[0].isfinite(), expected[0].isfinite())
    finite = expected[0].isfinite()
    assert ((got[0] - expected[0]).abs()[finite] <= (1e-12 * terms + 1e-323)[finite]).all()


@each_row("momentum", [0.0, 0.9])
@each_row("centered", [False, True])
def test_rmsprop_backward_at_the_edges_is_autograd(centered, momentum):
    du, g, v, *rest = edges(3 + centered)
    keep = ~(v < 0)
    du, g, v, a = du[keep], g[keep], v[keep], rest[0][keep] if centered else None
    settings = (1.0, 0.9, 1e-8, momentum, False)
    got = kernels.rmsprop_backward([du], [], [], [], [g], [v], [a] if centered else [], *settings)
    expected = rmsprop_gradients(du, None, None, None, g, v, a, *settings)
    new_v, new_a = rmsprop(g, v, a, None, None, *settings[:3], 0.0, False)[1:3]
    below = (new_v if new_a is None else at_least_zero(new_v - new_a * new_a)).sqrt() + 1e-8
    scale = (du / below).abs() + (0.2 * g * expected[1] / 0.9).abs()
    scale = scale if new_a is None else scale + (0.1 * expected[2] / 0.9).abs()
    assert_same_edges(got, tuple(x for x in expected if x is not None), scale)


def test_a_gradient_of_zero_gives_no_nan():
    zero, two = torch.zeros(3, dtype=torch.float64), torch.full((3,), 2.0, dtype=torch.float64)
    c = torch.tensor([[0.1, 0.01]], dtype=torch.float64)
    for eps in (1e-8, 1.0):
        lists = ([two], [two], [two], [zero], [zero], [zero], [])
        got = kernels.adam_backward(*lists, c, 1.0, 1.0, 0.9, 0.99, eps, 0.0, 0.0, False)
        to_m = 2 + 2 / 0.1 / eps
        for tensor, value in zip(got, (0.1 * to_m, 0.9 * to_m, 0.99 * 2), strict=True):
            torch.testing.assert_close(tensor, torch.full_like(zero, value))
        lists = ([two], [two], [two], [], [zero], [zero], [zero])
        got = kernels.rmsprop_backward(*lists, 1.0, 0.9, eps, 0.0, False)
        for tensor, value in zip(got, (2 / eps + 0.1 * 2, 0.9 * 2, 0.9 * 2), strict=True):
            torch.testing.assert_close(tensor, torch.full_like(zero, value))


@each_row("op", ["adam", "rmsprop"])
def test_the_whole_of_forward_and_backward_is_autograd(op):
    """The formula from its inputs on, not from its new averages, all three results used."""
    torch.manual_seed(0)
    g, m, v, *flows = [torch.randn(50, dtype=torch.float64) for _ in range(6)]
    inputs = [g.requires_grad_(), v.square().add(3).requires_grad_(), m.requires_grad_()]
    if op == "adam":
        g, v, m = inputs
        c = torch.tensor([0.3, 0.2], dtype=torch.float64)
        settings = (-0.3, 0.8, 0.9, 0.99, 1e-8, 1e-3, 0.0, False)
        p = torch.randn(50, dtype=torch.float64)
        results = adam(g, m, v, p, c, *settings)
        expected = torch.autograd.grad(results, (g, m, v), flows)
        with torch.no_grad():
            made = kernels.adam([g], [m], [v], [p], c[None], *settings)
            got = kernels.adam_backward(*([f] for f in flows), [g], [m], [v], [], c[None], *settings)
    else:
        settings = (-0.3, 0.9, 1e-8, 0.0, False)
        results = rmsprop(*inputs, None, None, *settings)[:3]
        expected = torch.autograd.grad(results, inputs, flows)
        with torch.no_grad():
            made = kernels.rmsprop(*([x] for x in inputs), [], [], *settings)
            got = kernels.rmsprop_backward(*([f] for f in flows), [], *([x] for x in inputs), *settings)
    for tensor, value in zip(made, results, strict=True):
        torch.testing.assert_close(tensor, value.detach())
    for tensor, value in zip(got, expected, strict=True):
        torch.testing.assert_close(tensor, value)
