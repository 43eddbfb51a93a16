"""``cg``, ``ns`` and ``ns_inv``: matrices, trees and functions; gradients implicit, checked against unrolled ones."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from tests.rows import each_row
from torchopt_dist import linalg


def double(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def spd(n=3):
    a = 0.4 * double(n, n)
    return a @ a.T + 0.7 * torch.eye(n, dtype=a.dtype)


def unrolled_cg(A, b, steps):
    """Conjugate gradients that autograd records."""
    x, r = torch.zeros_like(b), b
    p = r
    for _ in range(steps):
        alpha = (r @ r) / (p @ A @ p)
        x, new = x + alpha * p, r - alpha * (A @ p)
        p, r = new + (new @ new) / (r @ r) * p, new
    return x


def test_cg_of_a_scalar():
    """On a right-hand side without dimensions it once gave 0."""
    assert linalg.cg(lambda x: 4 * x, torch.tensor(2.0)).item() == 0.5


def test_implicit_gradients_are_those_of_the_unrolled_iterations():
    A, b = spd().requires_grad_(), double(3, seed=1).requires_grad_()
    ours = torch.autograd.grad(linalg.cg(A, b, rtol=1e-14).pow(2).sum(), (A, b))
    theirs = torch.autograd.grad(unrolled_cg(A, b, 3).pow(2).sum(), (A, b))
    torch.testing.assert_close(ours[0] + ours[0].T, theirs[0] + theirs[0].T)  # A stays symmetric
    torch.testing.assert_close(ours[1], theirs[1])


@each_row(
    "solve",
    [
        lambda A, b: linalg.cg((A + A.T) / 2, b, rtol=1e-14),
        lambda A, b: linalg.cg(lambda v: (A + A.T) @ v, b, rtol=1e-14),
        lambda A, b: linalg.ns(A, b, 300, alpha=0.5),
        lambda A, b: linalg.ns_inv(A, 300, alpha=0.5) @ b,
    ],
)
def test_derivatives_to_order_two(solve):
    # the series ends at a relative residual of 1e-5
    tolerance = {"atol": 2e-3, "rtol": 2e-3}
    arguments = (spd().requires_grad_(), double(3, seed=1).requires_grad_())
    assert gradcheck(solve, arguments, eps=1e-2, **tolerance)
    assert gradgradcheck(solve, arguments, eps=1e-2, atol=2e-2, rtol=2e-2)


@each_row("terms", [1, 4, 7])
def test_both_series_agree_to_the_last_term(terms):
    A, b = spd(), double(3, seed=1)
    powers = sum(torch.linalg.matrix_power(torch.eye(3) - 0.4 * A, i) for i in range(terms + 1))
    with pytest.warns(UserWarning, match="NeumannSeries stopped"):
        series, inverse = linalg.ns(A, b, terms, alpha=0.4), linalg.ns_inv(A, terms, alpha=0.4)
    torch.testing.assert_close(series, 0.4 * powers @ b)
    torch.testing.assert_close(inverse, 0.4 * powers)


def test_trees_of_matrices():
    A = {"a": spd(), "b": spd(2)}
    b = {"a": double(3), "b": double(2)}
    x = linalg.cg(
        A,
        b,
        {"a": b["a"], "b": b["b"]},
        rtol=1e-12,
        M={"a": torch.eye(3).double(), "b": torch.eye(2).double()},
    )
    for name in A:
        torch.testing.assert_close(x[name], torch.linalg.solve(A[name], b[name]))
        torch.testing.assert_close(linalg.ns(A, b, alpha=0.5)[name], x[name], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(linalg.ns_inv(A, alpha=0.5)[name], A[name].inverse(), rtol=1e-3, atol=1e-3)


def test_batches_and_torch_func():
    A, b = torch.stack([spd(), spd().inverse()]), double(2, 3)
    torch.testing.assert_close(torch.vmap(linalg.cg)(A, b), torch.linalg.solve(A, b), rtol=1e-4, atol=1e-4)
    gradient = torch.func.grad(lambda b: linalg.cg(A[0], b, rtol=1e-13).sum())(b[0])
    torch.testing.assert_close(gradient, torch.linalg.solve(A[0], torch.ones(3).double()))


@each_row(
    ("call", "kind", "message"),
    [
        (
            lambda: linalg.cg(torch.ones(2, 3), torch.ones(2)),
            ValueError,
            r"square matrix, got shape \(2, 3\)",
        ),
        (
            lambda: linalg.cg(torch.eye(2), torch.ones(3)),
            ValueError,
            r"as many rows as its matrix, 2, got shape \(3,\)",
        ),
        (lambda: linalg.cg([torch.eye(2)], torch.ones(2)), ValueError, "`A` must have the structure of `b`"),
        (
            lambda: linalg.cg(3, torch.ones(2)),
            TypeError,
            "`A` must be a tree of matrices or a function, got int",
        ),
        (lambda: linalg.ns(torch.eye(2), [1]), TypeError, "`b` must be a tree of floating-point tensors"),
        (lambda: linalg.ns_inv(torch.ones(2)), ValueError, r"square matrix, got shape \(2,\)"),
        (lambda: linalg.ns_inv(9 * torch.eye(2)), torch.linalg.LinAlgError, "diverged"),
    ],
)
def test_bad_input(call, kind, message):
    with pytest.raises(kind, match=message):
        call()
