"""What the estimates of adjoints are: closed forms, their formulas by hand, and the exact gradient they converge to."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchopt_dist as todist
from tests.diff.adjoint_table import FINITE, OPTIMIZERS, Problem, Regression, gradients
from tests.optim.table import ROWS
from tests.rows import each_row

SETTINGS = [(name, setting) for name, row in ROWS.items() for setting in row.options]


@each_row(("name", "setting"), SETTINGS)
@each_row("adjoint", FINITE)
def test_both_differences_are_their_formula_by_hand_with_every_optimizer(adjoint, name, setting):
    """The optimizer's Jacobian is taken by differences of its update here, and the gradients in closed form."""
    problem, row = Regression(), ROWS[name]
    impl = row.function(**row.options[setting])
    before, state = [problem.first.detach()], impl.init([problem.first.detach()])
    for number in range(3):
        grads = [problem.gradient(before[0])]
        with torch.no_grad():
            updates, following = impl.update(grads, state, params=before, inplace=False)
        if number < 2:
            before, state = [before[0] + updates[0]], following
    columns = []
    for unit in 1e-6 * torch.eye(3, dtype=torch.float64):
        with torch.no_grad():
            sides = [
                impl.update([grads[0] + sign * unit], state, params=before, inplace=False)[0][0]
                for sign in (1, -1)
            ]
        columns.append((sides[0] - sides[1]) / 2e-6)
    v = torch.stack(columns) @ problem.outer  # a row: what an element of the gradient moves
    point = before[0] if adjoint == "finite difference" else before[0] + updates[0]
    shift = 0.01 * v / v.norm() if v.any() else v
    difference = problem.of_weights(point + shift) - problem.of_weights(point - shift)
    expected = difference * v.norm() / 0.02

    result = problem.run(FINITE[adjoint], impl, 3)
    (found,) = torch.autograd.grad(result.params @ problem.outer, problem.weights, allow_unused=True)
    found = torch.zeros_like(expected) if found is None else found
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-8)


@each_row("kind", ["tree", "module"])
@each_row("optimizer", OPTIMIZERS)
def test_finite_difference_converges_to_the_gradient_through_the_last_step(optimizer, kind):
    def found(adjoint):
        problem = Problem(kind, optimizer)
        return gradients(problem.outer(problem.run(adjoint).params), problem.tensors())

    exact, coarse, fine = (
        found(way)
        for way in (todist.Truncated(1), todist.FiniteDifference(0.2), todist.FiniteDifference(0.1))
    )
    for what, gradient in exact.items():
        if gradient is None or not gradient.any():
            assert fine[what] is None or not fine[what].any(), what
        elif what == "hyper-parameter":
            torch.testing.assert_close(fine[what], gradient, rtol=1e-12, atol=0)
        else:
            errors = [(one[what] - gradient).norm() for one in (coarse, fine)]
            assert errors[1] < 0.01 * gradient.norm()
            assert errors[0] / errors[1] == pytest.approx(4, rel=0.1) or errors[0] < 1e-12, what


def test_sama_of_a_quadratic_in_closed_form():
    """``loss = (w - t)ᵀ A (w - t) / 2``: the gradient of ``t`` is ``lr A c``, wherever the parameters are."""
    matrix = torch.tensor([[2.0, 1.0], [1.0, 3.0]], dtype=torch.float64)
    target = torch.tensor([1.0, -1.0], dtype=torch.float64, requires_grad=True)
    first = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    outer = torch.tensor([0.5, 2.0], dtype=torch.float64)
    for alpha in (0.01, 1.0):
        adapted = todist.inner_loop(
            lambda w: (w - target) @ matrix @ (w - target) / 2,
            todist.sgd(lr=0.1),
            first,
            4,
            meta=target,
            adjoint=todist.SAMA(alpha),
        ).params
        found = torch.autograd.grad(adapted @ outer, target)[0]
        torch.testing.assert_close(found, 0.1 * matrix @ outer, rtol=1e-9, atol=0)


@each_row("name", FINITE)
def test_differences_take_random_numbers_buffers_and_the_last_batch(name):
    """With ``w`` and ``v`` as in closed form, what is differentiated must be the last step's loss and none other."""
    scale = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    first = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    xs = [torch.full((4,), float(n), dtype=torch.float64) for n in range(1, 4)]
    masks = []

    def loss(w, x):
        masks.append(torch.rand(4, dtype=torch.float64))
        return (masks[-1] * x * scale * w).sum()

    result = todist.inner_loop(loss, todist.sgd(lr=0.1), first, xs, meta=scale, adjoint=FINITE[name])
    trained = masks[:3]
    found = torch.autograd.grad(result.params.sum(), scale)[0]
    torch.testing.assert_close(found, -0.1 * 3 * trained[2].sum())  # the loss is linear in w
    assert all(torch.equal(mask, trained[2]) for mask in masks[3:])
    stopped = todist.inner_loop(
        loss, todist.sgd(lr=0.1), first, xs, meta=scale, adjoint=FINITE[name], stop=lambda n, _: n == 1
    )
    found = torch.autograd.grad(stopped.params.sum(), scale)[0]
    torch.testing.assert_close(found, -0.1 * 2 * masks[-1].sum())


def test_implicit_converges_as_fast_as_training_does():
    """Gradient descent contracts by ``1 - lr m`` a step, with ``m`` the smallest curvature; so does the error."""
    problem = Regression()
    exact = torch.autograd.grad((problem.minimum() ** 3).sum(), problem.weights)[0]
    hessian = problem.x.T @ (problem.weights.detach()[:, None] * problem.x) / 6 + 0.1 * torch.eye(3).double()
    slowest = torch.linalg.eigvalsh(hessian)[0].item()
    adjoint = todist.Implicit(todist.linear_solve.solve_cg(rtol=1e-13))
    errors = {}
    for steps in (100, 150, 500):
        adapted = problem.run(adjoint, todist.sgd(lr=0.4), steps).params
        found = torch.autograd.grad((adapted**3).sum(), problem.weights)[0]
        errors[steps] = ((found - exact).norm() / exact.norm()).item()
    assert errors[150] / errors[100] == pytest.approx((1 - 0.4 * slowest) ** 50, rel=0.05)
    assert errors[500] < 1e-9


def test_implicit_of_a_module_of_several_batches_and_to_second_order():
    problem = Regression()
    log_ridge = torch.tensor(-1.0, dtype=torch.float64, requires_grad=True)
    net = nn.Linear(3, 1, bias=False).double()
    halves = [slice(0, 3), slice(3, 6)] * 150

    def loss(net, half):
        error = net(problem.x[half]).squeeze(1) - problem.y[half]
        return (error**2).mean() / 2 + log_ridge.exp() / 2 * net.weight.square().sum()

    def solution(log_ridge):
        hessian = problem.x.T @ problem.x / 6 + log_ridge.exp() * torch.eye(3, dtype=torch.float64)
        return torch.linalg.solve(hessian, problem.x.T @ problem.y / 6)

    optimizer = todist.sgd(lr=lambda step: 0.5 * 0.97**step, momentum=0.9)
    solver = todist.linear_solve.solve_cg(rtol=1e-12)
    adapted = todist.inner_loop(
        loss, optimizer, net, halves, meta=log_ridge, adjoint=todist.Implicit(solver, batches=2)
    ).params
    torch.testing.assert_close(adapted.weight[0], solution(log_ridge), rtol=0, atol=0.02)
    net.load_state_dict({"weight": solution(log_ridge).detach()[None]})
    still = todist.inner_loop(
        loss, todist.sgd(lr=0.0), net, halves[:2], meta=log_ridge, adjoint=todist.Implicit(solver, batches=2)
    ).params
    outer, like = (still.weight**3).sum(), (solution(log_ridge) ** 3).sum()
    for _ in range(2):
        (outer,) = torch.autograd.grad(outer, log_ridge, create_graph=True)
        (like,) = torch.autograd.grad(like, log_ridge, create_graph=True)
        torch.testing.assert_close(outer, like, rtol=1e-8, atol=0)


def estimates(adjoint: Any, outer: Any, count: int) -> Tensor:
    """So many estimates of the gradient for the target of a quadratic, of shape (count, 2)."""
    target = torch.tensor([1.0, -1.0], dtype=torch.float64, requires_grad=True)
    first = torch.tensor([0.5, 0.5], dtype=torch.float64, requires_grad=True)
    torch.manual_seed(0)
    found = []
    for _ in range(count):
        result = todist.inner_loop(
            lambda w: (w - target).square().sum() / 2,
            todist.sgd(lr=0.3),
            first,
            3,
            meta=target,
            adjoint=adjoint,
        )
        found.append(torch.autograd.grad(outer(result), target)[0])
    return torch.stack(found)


@each_row(
    "adjoint",
    [
        todist.EvolutionStrategies(samples=1, sigma=0.5),
        todist.PersistentEvolutionStrategies(samples=1, sigma=0.5, unroll=2),
    ],
    ids=["ES", "PES"],
)
def test_estimates_of_a_quadratic_are_unbiased_within_their_own_spread(adjoint):
    def outer(result):
        return result.params @ torch.tensor([1.0, 2.0]).double() - result.losses.sum()

    (exact,) = estimates(todist.Recorded(), outer, 1)
    found = estimates(adjoint, outer, 100)
    error = (found.mean(0) - exact).abs()
    spread = found.std(0) / math.sqrt(len(found))
    assert (error < 4 * spread).all()
    assert (spread < 0.25 * exact.norm()).all()  # else anything would be within it


@pytest.mark.parametrize("unroll", [None, 2])
def test_the_formulas_of_evolution_strategies(monkeypatch, unroll):
    """By hand, from the same noise: three steps, of which the third is an unroll of its own."""
    problem, sigma = Regression(), 0.3
    seen = []

    def noise_of(seeds, tensors, draw=None):
        seen.extend(torch.Generator().manual_seed(seed) for seed in seeds)
        found = torch.stack(
            [
                torch.randn(6, generator=torch.Generator().manual_seed(seed % 2**31), dtype=torch.float64)
                for seed in seeds
            ]
        )
        made.update(zip(seeds, found, strict=True))
        return [found]

    made: dict[int, Tensor] = {}
    monkeypatch.setattr("torchopt_dist.diff.zero_order.noise_of", noise_of)
    monkeypatch.setattr("torchopt_dist.diff.adjoints._antithetic.noise_of", noise_of)
    settings = {"samples": 2, "sigma": sigma}
    adjoint = (
        todist.EvolutionStrategies(**settings)
        if unroll is None
        else todist.PersistentEvolutionStrategies(**settings, unroll=unroll)
    )
    result = problem.run(adjoint, todist.sgd(lr=0.2), 3)
    outer = result.params @ problem.outer + result.losses[0] + 2 * result.losses[2]
    (found,) = torch.autograd.grad(outer, problem.weights)
    noise = list(made.values())
    unrolls = [range(3)] if unroll is None else [range(2), range(2, 3)]
    assert len(noise) == 2 * len(unrolls)

    expected = torch.zeros(6, dtype=torch.float64)
    for pair in range(2):
        own = noise[pair * len(unrolls) : (pair + 1) * len(unrolls)]
        for sign in (1, -1):
            w, so_far = problem.first.detach(), torch.zeros(6, dtype=torch.float64)
            for steps, z in zip(unrolls, own, strict=True):
                so_far = so_far + z
                weights, amount = problem.weights.detach() + sign * sigma * z, 0.0
                for step in steps:
                    error = problem.x @ w - problem.y
                    loss = (weights * error**2).mean() / 2 + 0.05 * (w @ w)
                    amount = amount + {0: 1.0, 1: 0.0, 2: 2.0}[step] * loss
                    w = w - 0.2 * (problem.x.T @ (weights * error) / 6 + 0.1 * w)
                if steps[-1] == 2:
                    amount = amount + w @ problem.outer
                expected += sign * amount * so_far / (2 * sigma * 2)
    torch.testing.assert_close(found, expected)


@each_row("name", FINITE)
def test_differences_of_complex_parameters(name):
    """The mixed derivative is constant, so that a difference is exact, and the same at both ends of a step."""
    generator = torch.Generator().manual_seed(2)
    a, z, first = (torch.randn(s, dtype=torch.complex128, generator=generator) for s in ((3, 3), 3, 3))
    z.requires_grad_()
    first.requires_grad_()

    def gradient(adjoint):
        def loss(w):
            return (a @ w - z).abs().square().sum() + w.abs().pow(4).sum()

        made = todist.inner_loop(loss, todist.adam(lr=0.1), first, 3, meta=z, adjoint=adjoint)
        return torch.autograd.grad(made.params.abs().square().sum(), z)[0]

    torch.testing.assert_close(gradient(FINITE[name]), gradient(todist.Truncated(1)), rtol=1e-9, atol=1e-12)


def test_implicit_of_complex_parameters_whose_hessian_is_not_a_complex_matrix():
    target = torch.tensor([1.0 + 2.0j, -0.5j], dtype=torch.complex128, requires_grad=True)
    first = {
        "z": torch.zeros(2, dtype=torch.complex128, requires_grad=True),
        "r": torch.zeros(3, dtype=torch.float64, requires_grad=True),
    }

    def loss(params):  # 3 x² + x y + y²  for each z = x + i y, about the target; and real ones beside them
        z = params["z"] - target
        return (3 * z.real**2 + z.real * z.imag + z.imag**2).sum() + (params["r"] - z.imag[0]).square().sum()

    found = todist.inner_loop(
        loss,
        todist.sgd(lr=0.1),
        first,
        400,
        meta=target,
        adjoint=todist.Implicit(todist.linear_solve.solve_cg(rtol=1e-12)),
    ).params
    outer = (found["z"] * torch.tensor([1.0 + 3.0j, 2.0j])).real.sum() + found["r"].sum()
    (gradient,) = torch.autograd.grad(outer, target)  # the minimum is z = target, r = 0
    torch.testing.assert_close(gradient, torch.tensor([1.0 - 3.0j, -2.0j], dtype=torch.complex128))


def test_evolution_strategies_of_complex_tensors_have_noise_in_both_parts():
    target = torch.tensor(1.0 + 2.0j, dtype=torch.complex128, requires_grad=True)
    w = torch.tensor(0.5 - 1.0j, dtype=torch.complex128, requires_grad=True)
    torch.manual_seed(0)
    adapted = todist.inner_loop(
        lambda w: (w - target).abs() ** 2,
        todist.sgd(lr=0.25),
        w,
        2,
        meta=target,
        adjoint=todist.EvolutionStrategies(samples=5, sigma=0.1),
        seed=0,
    ).params
    (found,) = torch.autograd.grad((adapted * (2.0 + 3.0j)).real, target)
    torch.manual_seed(0)
    seeds = torch.randint(2**62, (5,)).tolist()
    pairs = [torch.randn(2, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    exact = (1 - 0.5**2) * torch.tensor([2.0, -3.0])  # the loop is linear
    expected = torch.stack([(exact @ z) * z for z in pairs]).mean(0)
    torch.testing.assert_close(torch.view_as_real(found), expected.double(), rtol=1e-5, atol=1e-6)
