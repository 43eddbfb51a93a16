"""Adam's one node where many gradients run at a time, where forward mode runs, and in half precision."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad, functional

from tests.ops.cases import needs_kernels
from tests.rows import each_row
from torchopt_dist.ops._adam import adam

DOUBLE = torch.float64
torchs_own = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
"""Torch compiles its formulas of forward mode when one is first used."""
FUSED = [False, pytest.param(None, marks=needs_kernels)]


def directions(fused, v):
    """A function of a gradient; the old averages depend on it, too."""
    numbers = {"b1": 0.9, "b2": 0.99, "eps": 1e-2, "eps_root": 1e-3, "fused": fused}

    def function(g):
        made = adam(
            [g, g.sum()], [g * 0.3, g[0]], [v, v[0]], [torch.tensor(3.0), torch.tensor(3.0)], **numbers
        )
        return made[0][0] + made[0][1] + made[2][0]

    return function


@pytest.fixture
def given():
    torch.manual_seed(0)
    return torch.randn(3, dtype=DOUBLE, requires_grad=True), torch.rand(3, dtype=DOUBLE)


def rows_one_by_one(function, g):
    made = function(g)
    return torch.stack(
        [torch.autograd.grad(made, g, one, retain_graph=True)[0] for one in torch.eye(3, dtype=DOUBLE)]
    )


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("create_graph", [False, True])
def test_many_gradients_at_a_time(fused, create_graph, given):
    g, v = given
    function = directions(fused, v)
    want, eye = rows_one_by_one(function, g), torch.eye(3, dtype=DOUBLE)
    keep = {"retain_graph": True, "create_graph": create_graph}
    made = function(g)
    (batched,) = torch.autograd.grad(made, g, eye, is_grads_batched=True, **keep)
    torch.testing.assert_close(batched, want)
    mapped = torch.func.vmap(lambda one: torch.autograd.grad(made, g, one, **keep)[0])(eye)
    torch.testing.assert_close(mapped, want)
    torch.testing.assert_close(
        functional.jacobian(function, g, vectorize=True, create_graph=create_graph), want
    )


@torchs_own
@pytest.mark.parametrize("fused", FUSED)
def test_hessians(fused, given):
    g, v = given
    function = directions(fused, v)

    def total(g):
        return function(g).pow(2).sum()

    want = functional.hessian(total, g)
    for options in ({"vectorize": True}, {"vectorize": True, "outer_jacobian_strategy": "forward-mode"}):
        torch.testing.assert_close(functional.hessian(total, g, **options), want)
    torch.testing.assert_close(torch.func.hessian(total)(g.detach()), want)


@torchs_own
@pytest.mark.parametrize("fused", FUSED)
def test_forward_mode_of_what_requires_grad(fused, given):
    g, v = given
    function = directions(fused, v)
    way = torch.tensor([1.0, -2.0, 0.5], dtype=DOUBLE)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(function(forward_ad.make_dual(g, way))).tangent
    torch.testing.assert_close(tangent, rows_one_by_one(function, g) @ way)


@needs_kernels
@each_row("dtype", [torch.float16, torch.bfloat16])
@each_row("create_graph", [False, True])
@each_row("value", [1e-3, 4e-3, 2e-2])
def test_a_half_gradient_is_that_of_float32(dtype, create_graph, value):
    """The new average of squares is 0 in float16, and the kernel's forward does not know that."""
    found = []
    for kind in (dtype, torch.float32):
        g = torch.tensor([value], dtype=dtype).to(kind).requires_grad_()
        zero = torch.zeros(1, dtype=kind)
        numbers = {"b1": 0.9, "b2": 0.999, "eps": 1e-2, "eps_root": 0.0}
        direction = adam([g], [zero], [zero], [torch.tensor(0.0)], **numbers)[0][0]
        (slope,) = torch.autograd.grad(direction.sum(), g, create_graph=create_graph)
        found.append((direction.float(), slope.float()))
    for half, single in zip(*found, strict=True):
        torch.testing.assert_close(half, single, rtol=1e-2, atol=0.0)
