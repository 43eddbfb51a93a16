"""Adam's formula, its one node and its kernels: derivatives, limits, and TorchOpt's face of it."""

import math

import pytest
import torch
from torch.autograd import forward_ad, gradcheck, gradgradcheck

import torchopt_dist as todist
from tests.ops.cases import needs_kernels
from torchopt_dist.ops import _bias_correction as bias_correction
from torchopt_dist.ops._adam import adam, adam_
from torchopt_dist.ops._rmsprop import rmsprop

DOUBLE = torch.float64
NUMBERS = {"b1": 0.8, "b2": 0.9, "eps": 0.05, "eps_root": 0.0}
FUSED = [
    False,
    pytest.param(None, marks=needs_kernels),
]


def tensors(*shapes):
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=DOUBLE) for shape in shapes]


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("steps", [(0.0, 0.0), (0.0, 4.0)], ids=str)
@pytest.mark.parametrize("eps_root", [0.0, 1e-2])
def test_derivatives_of_the_one_node(fused, whole, steps, eps_root):
    g, m, v, p = (tensors((2,), (3, 1)) for _ in range(4))
    v = [x.square() + 0.1 for x in v]
    numbers = {**NUMBERS, "eps_root": eps_root, "fused": fused}

    def compute(*leaves):
        columns = [list(leaves[i : i + 2]) for i in range(0, len(leaves), 2)]
        counts = [torch.tensor(t) for t in steps]
        params = columns[3] if whole else None
        more = {"lr": 0.3, "weight_decay": 0.1} if whole else {}
        moved, ms, vs, _ = adam(*columns[:3], counts, params, **numbers, **more)
        return *moved, *ms, *vs

    leaves = [x.requires_grad_() for x in (*g, *m, *v, *(p if whole else []))]
    assert gradcheck(compute, leaves)
    assert gradgradcheck(compute, leaves)


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("centered", [False, True])
def test_derivatives_of_rmsprop(fused, centered):
    g, v, a = (tensors((2,), (3, 1)) for _ in range(3))
    v = [x.square() + 5.0 for x in v]

    def compute(*leaves):
        columns = [list(leaves[i : i + 2]) for i in range(0, len(leaves), 2)]
        return tuple(x for column in rmsprop(*columns, alpha=0.9, eps=0.05, fused=fused) for x in column)

    leaves = [x.requires_grad_() for x in (*g, *v, *(a if centered else []))]
    assert gradcheck(compute, leaves)
    assert gradgradcheck(compute, leaves)


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 2)], ids=str)
def test_results_that_are_not_used_get_no_gradient_and_do_no_harm(fused, used):
    g, m, v = (tensors((4,)) for _ in range(3))
    leaves = [g[0].requires_grad_(), m[0].requires_grad_(), v[0].square().requires_grad_()]
    found = []
    for formula in (True, False):
        columns = [[x] for x in leaves]
        if formula:  # tensors for numbers: no node of our own
            numbers = {key: torch.tensor(value, dtype=DOUBLE) for key, value in NUMBERS.items()}
            made = adam(*columns, [torch.tensor(2.0)], **numbers)
        else:
            made = adam(*columns, [torch.tensor(2.0)], **NUMBERS, fused=fused)
        loss = sum(made[place][0].pow(2).sum() for place in used)
        found.append(torch.autograd.grad(loss, leaves, allow_unused=True))
    for want, got in zip(*found, strict=True):
        want = torch.zeros_like(leaves[0]) if want is None else want
        torch.testing.assert_close(torch.zeros_like(want) if got is None else got, want)


@pytest.mark.parametrize("fused", FUSED)
def test_where_the_gradient_has_always_been_zero_the_derivative_is_the_limit(fused):
    """The direction is g / (|g| + eps) at the first step: its slope at 0 is 1 / eps."""
    zero = torch.zeros(3, dtype=DOUBLE)
    g = zero.clone().requires_grad_()
    directions, *_ = adam([g], [zero], [zero], [torch.tensor(0.0)], **NUMBERS, fused=fused)
    (slope,) = torch.autograd.grad(directions[0].sum(), g, create_graph=True)
    torch.testing.assert_close(slope, torch.full_like(zero, 1 / 0.05))
    assert slope.requires_grad
    (bend,) = torch.autograd.grad(slope.sum(), g)
    assert bend.isfinite().all()


@pytest.mark.parametrize("fused", FUSED)
def test_infinities_and_denormals_are_as_in_the_formula(fused):
    g = torch.tensor([math.inf, -math.inf, math.nan, 5e-324, 1e-160, 1e160], dtype=DOUBLE)
    zero = torch.zeros_like(g)
    made = [
        adam([g], [zero], [zero], [torch.tensor(0.0)], **NUMBERS, fused=choice)[0][0]
        for choice in (False, fused)
    ]
    assert torch.equal(made[0].isnan(), made[1].isnan())
    torch.testing.assert_close(made[1], made[0], equal_nan=True)


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("maximize", [False, True])
def test_in_place_equals_the_recorded_step(fused, decoupled, maximize):
    g, m, v, p = (tensors((5,), (2, 3)) for _ in range(4))
    v = [x.square() for x in v]
    counts = [torch.tensor(3.0), torch.tensor(7.0)]
    numbers = {**NUMBERS, "lr": 0.3, "weight_decay": 0.1, "decoupled": decoupled, "fused": fused}
    numbers["maximize"] = maximize
    want = adam(g, m, v, counts, p, **numbers)
    adam_(p, g, m, v, counts, **numbers)
    for column, expected in zip((p, m, v, counts), want, strict=True):
        torch.testing.assert_close(column, expected)


def test_versions_count_what_the_kernel_overwrites():
    p, g, m, v = (torch.ones(2) for _ in range(4))
    before = [x._version for x in (p, m, v)]
    adam_([p], [g], [m], [v], [torch.tensor(0.0)], lr=0.1, b1=0.9, b2=0.99, eps=1e-8)
    assert all(x._version > old for x, old in zip((p, m, v), before, strict=True))


def test_adam_op_is_torchopts():
    mu, nu, g = (x.requires_grad_() for x in tensors((3,), (3,), (3,)))
    nu = (nu.detach().square() + 0.1).requires_grad_()
    op = todist.ops.AdamOp(b1=0.8, b2=0.9, eps=0.05, eps_root=0.01)

    def compute(mu, nu, g):
        return op(mu, nu, g, 4)

    assert gradcheck(compute, (mu, nu, g))
    assert gradgradcheck(compute, (mu, nu, g))
    new_mu, new_nu, direction = compute(mu, nu, g)
    torch.testing.assert_close(new_mu, 0.8 * mu + 0.2 * g)
    torch.testing.assert_close(new_nu, 0.9 * nu + 0.1 * g**2)
    below = (new_nu / (1 - 0.9**4) + 0.01).sqrt() + 0.05
    torch.testing.assert_close(direction, new_mu / (1 - 0.8**4) / below)
    with pytest.raises(ValueError, match="`mu`, `nu` and `updates` must have one shape, got "):
        op(mu, nu, torch.ones(2), 1)
    with pytest.raises(ValueError, match="`count` must be at least 1, got 0"):
        op(mu, nu, g, 0)


@needs_kernels
def test_what_keeps_the_kernel_from_being_used_is_said():
    x = torch.ones(2)
    numbers = {"b1": 0.9, "b2": 0.9, "eps": 0.1, "eps_root": 0.0, "fused": True}
    with pytest.raises(RuntimeError, match="the kernel takes hyper-parameters that are numbers"):
        adam([x], [x], [x], [torch.tensor(0.0)], **{**numbers, "eps": torch.tensor(0.1)})
    with (
        pytest.raises(RuntimeError, match=r"forward-mode differentiation is active"),
        forward_ad.dual_level(),
    ):
        adam([x], [x], [x], [torch.tensor(0.0)], **numbers)
    with pytest.raises(RuntimeError, match=r"the kernel has no torch.complex64"):
        adam([x.to(torch.complex64)], [x], [x], [torch.tensor(0.0)], **numbers)


@needs_kernels
@pytest.mark.parametrize("make", [torch.ones, torch.zeros])
def test_an_expanded_and_a_transposed_gradient_are_read_as_they_are(make):
    for grad in (make(()).expand(4, 5), torch.arange(20.0).view(5, 4).t()):
        found = []
        for fused in (False, True):
            p = torch.zeros(4, 5, requires_grad=True)
            p.grad = grad
            todist.Adam([p], lr=0.1, fused=fused).step()
            found.append(p.detach())
        torch.testing.assert_close(found[1], found[0])


def test_counts_for_an_op_are_themselves_or_float32():
    cpu = torch.device("cpu")
    one = [torch.tensor(3.0, device="cpu"), torch.tensor(3.0, device="cpu")]
    assert all(a is b for a, b in zip(bias_correction.on_device(one, cpu), one, strict=True))
    for values in ([3.0, 3.0], [3.0, 4.0]):
        given = [torch.tensor(value, dtype=DOUBLE, device="cpu") for value in values]
        made = bias_correction.on_device(given, cpu)  # as after a cast of the whole state
        assert [count.item() for count in made] == values
        assert {count.dtype for count in made} == {torch.float32}
