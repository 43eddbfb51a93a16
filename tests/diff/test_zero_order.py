"""``zero_order``: unbiased, the same on any number of workers, only numbers on the wire."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import Normal

import torchopt_dist as todist
from tests.processes import World
from tests.rows import each_row
from torchopt_dist.diff.zero_order import zero_order

NORMAL = Normal(0.0, 1.0)
METHODS = ["naive", "forward", "antithetic"]
POINT = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)


def double_noise(shape):
    return torch.randn(shape, dtype=torch.float64)


def gradient(function, *points, **settings):
    points = [point.clone().requires_grad_() for point in points]
    return torch.autograd.grad(zero_order(double_noise, **settings)(function)(*points), points)


@each_row("method", METHODS)
@each_row("sigma", [0.1, 1.0])
def test_unbiased_within_its_own_spread(method, sigma):
    """The gradient of ½ x·x is x, smoothed or not; estimates of 400 batches lie around it as their spread says."""
    torch.manual_seed(0)
    estimates = torch.stack(
        [
            gradient(
                lambda x: 0.5 * (x @ x), POINT, method=method, sigma=sigma, num_samples=20, vectorize=True
            )[0]
            for _ in range(400)
        ]
    )
    error = (estimates.mean(0) - POINT).abs()
    assert (error < 4.5 * estimates.std(0) / math.sqrt(400)).all()


@each_row("sigma", [0.1, 3.0])
def test_antithetic_and_forward_estimates_of_a_plane_vary_with_the_noise_only(sigma):
    """A linear function: each is the mean of (a·z) z, whatever sigma is; so sigma divides, and does not multiply."""
    for method in ("forward", "antithetic"):
        torch.manual_seed(3)
        (estimate,) = gradient(
            lambda x: POINT @ x, 0 * POINT, method=method, sigma=sigma, num_samples=2000, vectorize=True
        )
        torch.testing.assert_close(estimate, POINT, rtol=0.2, atol=0.3)


def test_the_formulas():
    """Each method by hand, from the same noise."""
    seen = []

    def noise(shape):
        seen.append(torch.randn(shape, dtype=torch.float64))
        return seen[-1]

    def f(x):
        return (x**3).sum()

    sigma, n = 0.3, 4
    for method in METHODS:
        seen.clear()
        x = POINT.clone().requires_grad_()
        value = zero_order(noise, method, num_samples=n, sigma=sigma)(f)(x)
        z = seen[:n]
        (ours,) = torch.autograd.grad(2 * value, x)
        if method == "naive":
            parts = [f(POINT + sigma * e) * e / sigma for e in z]
        elif method == "forward":
            parts = [(f(POINT + sigma * e) - f(POINT)) * e / sigma for e in z]
        else:
            parts = [(f(POINT + sigma * e) - f(POINT - sigma * e)) * e / (2 * sigma) for e in z]
        torch.testing.assert_close(ours, 2 * torch.stack(parts).mean(0))
        assert len(seen) == 2 * n  # noise is made again, not kept


def test_vectorized_in_chunks_or_not_is_the_same():
    results = []
    for settings in ({}, {"vectorize": True}, {"vectorize": True, "chunk_size": 3}):
        torch.manual_seed(1)
        results.append(gradient(lambda x: (x**2).sum(), POINT, num_samples=10, **settings)[0])
    torch.testing.assert_close(results[0], results[1])
    torch.testing.assert_close(results[0], results[2])


def test_trees_argnums_keywords_and_a_function_that_is_not_differentiable():
    torch.manual_seed(0)
    tree = {"w": torch.zeros(2, requires_grad=True), "b": torch.tensor(0.5, requires_grad=True), "n": 3}
    other = torch.ones(2, requires_grad=True)

    @zero_order(NORMAL, "antithetic", argnums=1, num_samples=4000, sigma=0.5)
    def f(scale, tree, *, shift):
        with torch.no_grad():
            return float(scale.sum() * (tree["w"].sum() + tree["n"] * tree["b"]) + shift)

    f(other, tree, shift=1.0).backward()
    assert other.grad is None
    torch.testing.assert_close(tree["w"].grad, torch.full((2,), 2.0), rtol=0.2, atol=0.2)
    torch.testing.assert_close(tree["b"].grad, torch.tensor(6.0), rtol=0.2, atol=0.2)


def test_the_generator_goes_on_as_if_nothing_but_the_seeds_were_drawn():
    torch.manual_seed(5)
    torch.randint(2**62, (7,))
    expected = torch.rand(3)
    torch.manual_seed(5)
    gradient(lambda x: x.sum(), POINT, num_samples=7)
    assert torch.equal(torch.rand(3), expected)


def test_a_second_derivative_is_refused():
    x = POINT.clone().requires_grad_()
    (slope,) = torch.autograd.grad(
        zero_order(double_noise, num_samples=2)(lambda x: x @ x)(x), x, create_graph=True
    )
    with pytest.raises(RuntimeError, match="does not require grad"):
        slope.sum().backward()


def spread():
    sent = []

    def loss(x):
        sent.append(todist.get_rank())
        return (x**4).sum() + todist.get_world_size() * 0

    parallel = todist.parallelize(
        todist.batch_partitioner, todist.concatenate_reducer, isolate_own_share=False
    )  # so that `sent` is filled
    torch.manual_seed(2)
    (found,) = gradient(loss, POINT, method="antithetic", num_samples=9, sigma=0.2, parallel=parallel)
    return found.numpy(), len(sent)


def test_the_same_estimate_on_any_number_of_workers():
    torch.manual_seed(2)
    (here,) = gradient(lambda x: (x**4).sum(), POINT, method="antithetic", num_samples=9, sigma=0.2)
    for size in (1, 2):
        found, own = World(size).on_zero(spread, timeout=200)
        torch.testing.assert_close(torch.from_numpy(found), here, rtol=1e-12, atol=1e-12)
        assert own == (18 if size == 1 else 10)


def identity(x):
    return x.sum()


@each_row(
    ("call", "kind", "message"),
    [
        (
            lambda: zero_order(NORMAL, "reverse"),
            ValueError,
            "`method` must be 'naive', 'forward' or 'antithetic'",
        ),
        (lambda: zero_order(NORMAL, num_samples=0), ValueError, "`num_samples` must be at least 1, got 0"),
        (
            lambda: zero_order(NORMAL, num_samples=1.5),
            TypeError,
            "`num_samples` must be an integer, got float 1.5",
        ),
        (lambda: zero_order(NORMAL, chunk_size=0), ValueError, "`chunk_size` must be at least 1, got 0"),
        (lambda: zero_order(NORMAL, sigma=0.0), ValueError, "`sigma` must be finite and above 0, got 0.0"),
        (lambda: zero_order(NORMAL, sigma=-1.0), ValueError, "`sigma` must be finite and above 0, got -1.0"),
        (
            lambda: zero_order(NORMAL, sigma=math.nan),
            ValueError,
            "`sigma` must be finite and above 0, got nan",
        ),
        (lambda: zero_order(3), TypeError, "`distribution` must have a method `sample`, or be a function"),
        (lambda: zero_order(NORMAL, argnums=()), TypeError, "`argnums` must be an integer or a sequence"),
        (lambda: zero_order(NORMAL, parallel=2), TypeError, "`parallel` must be a decorator, got 2"),
        (lambda: zero_order(NORMAL)(3), TypeError, "`zero_order` decorates a function, got int"),
        (
            lambda: zero_order(NORMAL, argnums=1)(identity)(POINT),
            ValueError,
            "positions among the 1 arguments, got 1",
        ),
        (lambda: zero_order(NORMAL)(identity)(3), ValueError, "must have a floating-point tensor among them"),
        (
            lambda: zero_order(NORMAL)(lambda pair: pair[0].sum())(
                [POINT, torch.zeros(2, dtype=torch.complex64, requires_grad=True)]
            ),
            TypeError,
            "must have no complex tensor that requires grad",
        ),
        (
            lambda: zero_order(NORMAL)(lambda x: x)(POINT),
            ValueError,
            r"must return one number, got a tensor of shape \(3,\)",
        ),
        (
            lambda: zero_order(lambda shape: torch.ones(2))(identity)(POINT),
            ValueError,
            r"asked for, \(3,\), got \(2,\)",
        ),
    ],
)
def test_bad_input(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


@each_row("transform", [torch.vmap, torch.func.grad])
def test_a_transform_is_refused_by_name(transform):
    loss = zero_order(NORMAL)(lambda x: x.square().sum())
    with pytest.raises(
        NotImplementedError, match=r"`zero_order` does not run inside torch\.func's transforms"
    ):
        transform(lambda x: loss(x * 1))(torch.ones(3))
