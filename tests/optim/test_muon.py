"""Muon → torch's steps, the orthogonal factor of a matrix, and derivatives by finite differences.

It is not a row of ``table.py``, whose networks have other parameters than matrices.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck

import torchopt_dist as todist
from tests.rows import each_row
from torchopt_dist.transform import orthogonalize

DOUBLE = torch.float64


def matrix(*shape, seed=0, dtype=DOUBLE):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def by_hand(p, grads, lr, weight_decay, momentum, nesterov, adjust, steps=5):
    """A loop over one matrix; the iteration acts on singular values alone, so it is made on them."""
    average = torch.zeros_like(p)
    for g in grads:
        average = momentum * average + (1 - momentum) * g
        u = (1 - momentum) * g + momentum * average if nesterov else average
        left, values, right = torch.linalg.svd(u, full_matrices=False)
        values = values / values.square().sum().sqrt()
        for _ in range(steps):
            values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
        rows, columns = p.shape
        factor = max(1, rows / columns) ** 0.5 if adjust is None else 0.2 * max(rows, columns) ** 0.5
        p = p - lr * (factor * (left * values) @ right + weight_decay * p)
    return p


@each_row("shape", [(4, 3), (3, 5), (2, 2)])
@each_row(("nesterov", "adjust"), [(True, None), (False, "match_rms_adamw")])
def test_steps_equal_those_on_singular_values_and_about_torchs(shape, nesterov, adjust):
    options = {"lr": 0.1, "weight_decay": 0.2, "momentum": 0.8, "nesterov": nesterov, "adjust_lr_fn": adjust}
    start, grads = matrix(*shape), [matrix(*shape, seed=seed) for seed in range(1, 5)]
    ends = []
    for kind in (todist.Muon, torch.optim.Muon):
        p = nn.Parameter(start.clone())
        optimizer = kind([p], **options)
        for grad in grads:
            p.grad = grad.clone()
            optimizer.step()
            assert torch.equal(p.grad, grad)
        ends.append(p.detach())
    hand = by_hand(start, grads, 0.1, 0.2, 0.8, nesterov, adjust)
    torch.testing.assert_close(ends[0], hand, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(ends[0], ends[1], rtol=0.02, atol=0.01)  # torch iterates in bfloat16


@pytest.mark.parametrize("shape", [(3, 2), (2, 3)])
def test_converging_coefficients_give_the_orthogonal_factor(shape):
    x = matrix(*shape)
    left, _, right = torch.linalg.svd(x, full_matrices=False)
    impl = orthogonalize((2.0, -1.5, 0.5), ns_steps=40, adjust_lr_fn=None)
    factor = max(1, shape[0] / shape[1]) ** 0.5
    torch.testing.assert_close(impl.update(x, impl.init(x))[0], factor * left @ right)


@each_row("dtype", [torch.float32, DOUBLE, torch.bfloat16])
@each_row("eps", [1e-7, 1e-22, 1e-40, 0.0])
def test_zeros_and_matrices_of_any_size_are_orthogonalized(eps, dtype):
    impl, x = orthogonalize(eps=eps), matrix(3, 4, dtype=dtype)
    for size in (0.0, 1e-30, 1e-12, 1e25):
        scaled = x.double() * size
        wanted = scaled / max(scaled.norm().item(), eps or 1e-300)
        expected = impl.update(wanted, impl.init(x))[0] if wanted.norm() > 0.5 else None
        found = impl.update(scaled.to(dtype), impl.init(x))[0].double()
        if expected is None:  # divided by `eps`, and made at most 3.4445 times as large by each iteration
            assert found.norm() <= 3.4445**5 * wanted.norm() * 1.01
        else:
            torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


def test_a_matrix_of_zeros_stays_as_torchs_muon_leaves_it():
    for eps in (1e-7, 1e-22, 1e-40):
        ends = []
        for kind in (todist.Muon, torch.optim.Muon):
            p = nn.Parameter(torch.ones(3, 4))
            p.grad = torch.zeros(3, 4)
            kind([p], lr=0.1, eps=eps).step()
            ends.append(p.detach())
        torch.testing.assert_close(*ends)


def test_derivatives_through_two_steps():
    p, target = matrix(3, 2).requires_grad_(), matrix(3, 2, seed=9)
    numbers = [torch.tensor(x, dtype=DOUBLE, requires_grad=True) for x in (0.1, 0.2, 0.7)]

    def after(p, lr, weight_decay, momentum):
        impl = todist.muon(lr, weight_decay, momentum, ns_steps=2)
        state = impl.init([p])
        for _ in range(2):
            updates, state = impl.update([(p - target) ** 3], state, params=[p], inplace=False)
            (p,) = todist.apply_updates([p], updates, inplace=False)
        return p

    assert gradcheck(after, (p, *numbers))
    assert gradgradcheck(after, (p, *numbers), atol=1e-4)


def test_a_gradient_of_zeros_stays_finite_in_values_and_derivatives():
    net = nn.Linear(2, 3, bias=False).double()
    first = net.weight
    optimizer = todist.MetaMuon(net, lr=0.1, weight_decay=0.0)
    optimizer.step((0 * net.weight).sum())
    torch.testing.assert_close(net.weight, first)
    (grad,) = torch.autograd.grad(net.weight.square().sum(), first)
    torch.testing.assert_close(grad, 2 * first.detach())


def test_what_is_no_matrix_is_refused_with_the_remedy():
    with pytest.raises(ValueError, match=r"must be matrices .* shape \(1,\) at leaf 0: .*`partition"):
        todist.MetaMuon(nn.Linear(2, 1))
    with pytest.raises(TypeError, match="must be real"):
        todist.muon().init([torch.ones(2, 2, dtype=torch.complex64)])
    for options, error in (
        ({"ns_steps": 0}, ValueError),
        ({"ns_steps": 1.5}, TypeError),
        ({"ns_coefficients": (1.0, 2.0)}, TypeError),
        ({"adjust_lr_fn": "other"}, ValueError),
        ({"momentum": 1.0}, ValueError),
    ):
        with pytest.raises(error, match=f"`{next(iter(options))}` must be"):
            todist.muon(**options)
