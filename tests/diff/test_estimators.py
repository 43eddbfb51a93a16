"""The adjoints that estimate: against closed forms, their formulas by hand, and the exact gradient they converge to."""

from __future__ import annotations

import dataclasses
import itertools
import math
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchopt_dist as todist
from tests.diff.adjoint_table import ALL, ESTIMATORS, OPTIMIZERS, Problem, gradients
from tests.optim.table import ROWS
from tests.worlds import World
from torchopt_dist import pytree
from torchopt_dist.distributed.partition import TensorDimensionPartitioner

SETTINGS = [(name, setting) for name, row in ROWS.items() for setting in row.options]
FINITE = {name: ESTIMATORS[name] for name in ("finite difference", "SAMA")}
SAMPLED = {name: adjoint for name, adjoint in ESTIMATORS.items() if "evolution" in name}


class Regression:
    """Linear regression with a weight for each example; the loss is of every kind known in closed form."""

    def __init__(self, ridge: float = 0.1) -> None:
        generator = torch.Generator().manual_seed(3)
        double = {"dtype": torch.float64, "generator": generator}
        self.x, self.y = torch.randn(6, 3, **double), torch.randn(6, **double)
        self.weights = (0.5 + torch.rand(6, **double)).requires_grad_()
        self.first = torch.randn(3, **double).requires_grad_()
        self.outer = torch.randn(3, **double)
        self.ridge = ridge

    def loss(self, w: Tensor) -> Tensor:
        return (self.weights * (self.x @ w - self.y) ** 2).mean() / 2 + self.ridge / 2 * (w @ w)

    def gradient(self, w: Tensor) -> Tensor:
        return self.x.T @ (self.weights.detach() * (self.x @ w - self.y)) / 6 + self.ridge * w

    def of_weights(self, w: Tensor) -> Tensor:
        """The loss's gradient with respect to the examples' weights."""
        return (self.x @ w - self.y) ** 2 / 12

    def minimum(self) -> Tensor:
        hessian = self.x.T @ (self.weights[:, None] * self.x) / 6 + self.ridge * torch.eye(
            3, dtype=torch.float64
        )
        return torch.linalg.solve(hessian, self.x.T @ (self.weights * self.y) / 6)

    def run(self, adjoint: Any, optimizer: Any, steps: int, **options: Any) -> todist.InnerLoopResult:
        return todist.inner_loop(
            self.loss, optimizer, self.first, steps, meta=self.weights, adjoint=adjoint, **options
        )


@pytest.mark.parametrize(("name", "setting"), SETTINGS)
@pytest.mark.parametrize("adjoint", FINITE)
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


@pytest.mark.parametrize("kind", ["tree", "module"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
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


@pytest.mark.parametrize("name", FINITE)
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


@pytest.mark.parametrize(
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


def spread_over(workers: list[int]) -> tuple[list[Any], list[tuple[int, ...]]]:
    shapes = []
    torch.manual_seed(4)
    # No bias, whose gradient before a BatchNorm is rounding, which Adam divides by itself.
    net = nn.Sequential(
        nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2), nn.Dropout(0.5), nn.Linear(2, 1)
    ).double()
    xs = [torch.randn(4, 2, dtype=torch.float64) for _ in range(3)]
    weights = torch.ones(4, dtype=torch.float64, requires_grad=True)
    lr = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)

    def loss(net, x):
        return (weights * net(x).squeeze(1).square()).mean()

    everywhere = todist.parallelize(
        TensorDimensionPartitioner(0, workers=workers or None), todist.concatenate_reducer
    )

    def spread(function):
        def watched(seeds):
            values = everywhere(function)(seeds)
            shapes.append(tuple(values.shape))
            return values

        return watched

    parallel = spread if workers else None
    found = []
    for adjoint in (
        todist.EvolutionStrategies(4, 0.1, parallel),
        todist.PersistentEvolutionStrategies(4, 0.1, parallel, unroll=2),
    ):
        result = todist.inner_loop(loss, todist.adam(lr=lr), net, xs, meta=weights, adjoint=adjoint, seed=5)
        outer = result.losses.sum() + sum(p.sum() for p in result.params.parameters())
        found += [grad.numpy() for grad in torch.autograd.grad(outer, (weights, lr))]
    return found, shapes


def tasks_over(workers: list[int]) -> list[Any]:
    """The gradients of a call whose tasks estimate theirs by pairs, which are spread once more."""
    torch.manual_seed(5)
    double = {"dtype": torch.float64}
    xs, first = torch.randn(4, 5, 2, **double), torch.randn(2, **double, requires_grad=True)
    weights, lr = torch.rand(5, **double, requires_grad=True), torch.tensor(0.1, **double, requires_grad=True)
    parallel = todist.parallelize(TensorDimensionPartitioner(0), todist.concatenate_reducer)

    def task(x, weights, lr, first, unroll):
        def loss(w):
            return (weights * (x @ w - 1) ** 2).mean() + w.square().sum()

        adjoint = todist.PersistentEvolutionStrategies(2, 0.1, parallel, unroll=unroll)
        made = todist.inner_loop(loss, todist.adam(lr=lr), first, 3, meta=weights, adjoint=adjoint)
        return made.params.square().sum()

    call = todist.parallelize(
        TensorDimensionPartitioner(0, exclusive=True, workers=workers), todist.stack_reducer
    )(task)
    found = []
    for unroll in (3, 2):
        torch.manual_seed(6)
        values = call(xs, *map(todist.replicated, (weights, lr, first)), unroll)
        found += [grad.numpy() for grad in torch.autograd.grad(values.square().sum(), (weights, lr))]
    return found


def spread() -> tuple[list[Any], list[Any]]:
    over_workers = [spread_over(workers) for workers in ([0], [0, 1], [0, 1, 2])]
    return over_workers, [tasks_over(workers) for workers in ([0], [0, 1, 2])]


def test_the_same_estimates_on_any_number_of_workers_and_in_tasks():
    here, _ = spread_over([])
    over_workers, (tasks_on_one, tasks_on_three) = World(3).on_zero(spread)
    for found, shapes in over_workers:
        for one, like in zip(found, here, strict=True):
            torch.testing.assert_close(torch.from_numpy(one), torch.from_numpy(like), rtol=1e-12, atol=1e-13)
        assert shapes == [(4, 1, 2), (4, 2, 2)]  # two numbers a pair and unroll
    for one, like in zip(tasks_on_three, tasks_on_one, strict=True):
        torch.testing.assert_close(torch.from_numpy(one), torch.from_numpy(like), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", FINITE)
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


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_meta_tensor_that_is_overwritten_before_backward_is_an_error(name):
    w, meta = torch.ones(2, requires_grad=True), torch.full((2,), 3.0, requires_grad=True)
    adapted = todist.inner_loop(
        lambda w: (w - meta).square().sum(), todist.sgd(lr=0.25), w, 2, meta=meta, adjoint=ESTIMATORS[name]
    )
    with torch.no_grad():
        meta.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        adapted.params.sum().backward()


@pytest.mark.parametrize("name", SAMPLED)
def test_so_are_first_parameters_where_the_loop_is_run_again_from_them(name):
    w, meta = torch.ones(2, requires_grad=True), torch.full((2,), 3.0, requires_grad=True)
    adapted = todist.inner_loop(
        lambda w: (w - meta).square().sum(), todist.sgd(lr=0.25), w, 2, meta=meta, adjoint=SAMPLED[name]
    )
    with torch.no_grad():
        w.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        adapted.params.sum().backward()


@pytest.mark.parametrize("name", SAMPLED)
def test_evolution_strategies_of_a_loss_under_a_checkpoint(name):
    w = torch.tensor([0.5, -0.3], dtype=torch.float64, requires_grad=True)
    first = torch.tensor([0.7, 1.2], dtype=torch.float64, requires_grad=True)
    scale = first * 1.0

    def part(w):
        return (w * scale).sin().sum()

    def again(w):
        return torch.utils.checkpoint.checkpoint(part, w, use_reentrant=False)

    found = []
    for loss in (part, again):  # backward computes the second one again, with the noise of the pair
        torch.manual_seed(0)
        adapted = todist.inner_loop(loss, todist.sgd(lr=0.1), w, 3, meta=scale, adjoint=SAMPLED[name], seed=0)
        found += torch.autograd.grad(adapted.params.sin().sum(), first, retain_graph=True)
    assert found[0].any()
    torch.testing.assert_close(found[1], found[0])


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


@pytest.mark.parametrize("name", FINITE)
def test_after_a_difference_a_parameter_that_the_last_loss_did_not_use_is_trained_on(name):
    params = {key: torch.ones(2, requires_grad=True) for key in ("a", "b")}
    weight = torch.tensor(1.0, requires_grad=True)

    def loss(params, key):
        return weight * params[key].square().sum()

    options = {"meta": weight, "adjoint": FINITE[name]}
    first = todist.inner_loop(loss, todist.sgd(lr=0.25), params, ["a"], **options)
    second = todist.inner_loop(loss, todist.sgd(lr=0.25), first.params, ["b"], state=first.state, **options)
    assert second.params["a"].tolist() == second.params["b"].tolist() == [0.5, 0.5]


def test_the_first_parameters_of_a_step_by_a_difference_may_be_overwritten():
    first, x = torch.ones(3, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    adapted = todist.inner_loop(
        lambda w: (x * w).square().sum() / 2, todist.sgd(lr=0.1), first, 1, meta=x, adjoint=todist.SAMA()
    ).params
    torch.testing.assert_close(first, torch.ones(3), rtol=0.0, atol=0.0)
    first.detach().zero_()
    # ∂²loss/∂w∂x = 2 x w, at w = 0.6, times ∂update/∂g = -0.1, in three elements
    torch.testing.assert_close(torch.autograd.grad(adapted.sum(), x)[0].item(), -0.72, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("name", [*FINITE, "implicit"])
def test_an_estimate_in_the_loss_of_another_one(name):
    """A leaf is declared as it is, and a result of others is exchanged for another tensor: also in the inner loop."""
    leaf = torch.tensor([0.5, 1.5], dtype=torch.float64, requires_grad=True)
    first = torch.tensor([1.0, -1.0], dtype=torch.float64, requires_grad=True)

    def adapted(meta):
        def loss(p):
            inner = todist.inner_loop(
                lambda q: (meta * (q - p) ** 2).sum() + (q**4).sum(), todist.sgd(lr=0.1), first, 5,
                meta=(p, meta), adjoint=ESTIMATORS[name],
            ).params  # fmt: skip
            return (inner**2).sum() + p.square().sum()

        made = todist.inner_loop(loss, todist.sgd(lr=0.1), first, 3, meta=meta, adjoint=todist.SAMA())
        return torch.autograd.grad(made.params.sum(), leaf)[0]

    expected = adapted(leaf)
    assert expected.any()
    torch.testing.assert_close(adapted(leaf * 1), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_what_the_loss_uses_and_meta_does_not_list_is_an_error(name):
    problem = Regression()
    options = {
        "optimizer": todist.sgd(lr=0.1),
        "params": problem.first,
        "batches": 2,
        "adjoint": ESTIMATORS[name],
    }
    with pytest.raises(ValueError, match=r"`meta` must list every .* lacks 1, of shape \(6,\)"):
        todist.inner_loop(problem.loss, **options)
    # What is listed is what stands in the graph before what the loss uses.
    used = problem.weights * 2
    with pytest.raises(ValueError, match=r"of shape \(6,\)"):
        todist.inner_loop(
            lambda w: (used * (problem.x @ w - problem.y) ** 2).mean(), **options, meta=problem.weights
        )
    todist.inner_loop(lambda w: (used * (problem.x @ w - problem.y) ** 2).mean(), **options, meta=used)
    with pytest.raises(ValueError, match=r"of shape \(6,\)"):
        todist.inner_loop(
            lambda w, x: (w * x).square().sum(),
            **{**options, "batches": lambda number: problem.weights[number]},
            steps=2,
        )


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_loss_may_make_leaves_of_its_own(name):
    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    first = torch.ones(2, dtype=torch.float64, requires_grad=True)

    def loss(w):
        own = torch.ones(2, dtype=torch.float64, requires_grad=True)
        return (scale * (w - own) ** 2).sum()

    adapted = todist.inner_loop(
        loss, todist.sgd(lr=0.1), first, 2, meta=scale, adjoint=ESTIMATORS[name]
    ).params
    assert torch.autograd.grad(adapted.sum(), scale)[0].shape == ()


@pytest.mark.parametrize("name", ESTIMATORS)
def test_in_nested_vmap_each_task_has_its_own_gradient_and_nothing_is_lost(name):
    problem = Regression()
    scales = (0.5 + torch.rand(3, 2, dtype=torch.float64)).requires_grad_()
    firsts = problem.first + torch.rand(2, 3, dtype=torch.float64)

    def adapted(meta, adjoint=ESTIMATORS[name]):
        return lambda first, scale: (
            todist.inner_loop(
                lambda w: problem.loss(w) * scale,
                todist.sgd(lr=0.1),
                first,
                2,
                meta=meta(scale),
                adjoint=adjoint,
                seed=0,
            ).params
        )

    task = adapted(lambda scale: (problem.weights, scale))
    torch.manual_seed(0)
    one_by_one = torch.stack(
        [
            torch.stack([task(first, scale) for scale in row])
            for first, row in zip(firsts, scales.T, strict=True)
        ]
    )
    torch.manual_seed(0)
    at_once = torch.vmap(torch.vmap(task, in_dims=(None, 0)), in_dims=(0, 1))(firsts, scales)
    ins = (problem.weights, scales)
    found = torch.autograd.grad((at_once**2).sum(), ins, create_graph=True)
    expected = torch.autograd.grad((one_by_one**2).sum(), ins)
    torch.testing.assert_close(found, expected, rtol=1e-6 if name == "implicit" else 1e-10, atol=1e-12)
    if name != "implicit":
        with pytest.raises(NotImplementedError, match="is an estimate that cannot be differentiated itself"):
            (found[0].sum() + scales.sum()).backward()
    with pytest.raises(ValueError, match=r"`meta` must list every .* lacks 1, of shape \(6,\)"):
        torch.vmap(adapted(lambda scale: scale))(firsts, scales[0])
    with pytest.raises(
        NotImplementedError, match=r"does not run inside `torch.func.grad`.*outside of `vmap`"
    ):
        torch.func.grad(lambda scale: task(firsts[0], scale).sum())(scales[0, 0].detach())
    if "evolution" in name:
        spread = adapted(lambda scale: ins, dataclasses.replace(ESTIMATORS[name], parallel=lambda f: f))
        with pytest.raises(
            NotImplementedError, match=r"`.*\(parallel=...\)` does not .*: leave `parallel` out"
        ):
            torch.vmap(spread)(firsts, scales[0])


@pytest.mark.parametrize("name", FINITE)
def test_a_single_step_takes_the_values_of_what_it_starts_from_and_leaves_them(name):
    problem, optimizer = Regression(), todist.sgd(lr=0.1, momentum=0.9)
    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    state = pytree.map_tensors(lambda tensor: scale * torch.ones_like(tensor), optimizer.init(problem.first))
    values = [tensor.detach().clone() for tensor in (problem.first, *pytree.flatten(state)[0])]
    exact = problem.run(todist.Recorded(), optimizer, 1, state=state)
    made = problem.run(FINITE[name], optimizer, 1, state=state)
    torch.testing.assert_close(made.params, exact.params)
    ends = [made.params.sum(), *[leaf.sum() for leaf in pytree.flatten(made.state)[0]]]
    ins = (problem.weights, scale, problem.first)
    of_weights, *others = torch.autograd.grad(ends[0] + sum(ends[1:]), ins, allow_unused=True)
    assert of_weights is not None
    assert others == [None, None]
    torch.testing.assert_close([problem.first, *pytree.flatten(state)[0]], values)


@pytest.mark.parametrize("name", FINITE)
def test_differences_in_vmap_draw_what_the_step_of_the_task_has_drawn(name):
    scale = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    xs = torch.rand(3, 4, dtype=torch.float64)

    def task(x):
        def loss(w):
            mask = torch.rand(4, dtype=torch.float64)
            return (mask * x * scale * w).sum(), mask

        first = torch.zeros_like(x) + x
        made = todist.inner_loop(
            loss, todist.sgd(lr=0.1), first, 2, meta=scale, adjoint=FINITE[name], has_aux=True
        )
        return made.params.sum(), made.aux[-1]

    adapted, masks = torch.vmap(task, randomness="different")(xs)
    assert len(masks.unique()) == 12
    found = torch.autograd.grad(adapted @ torch.arange(3.0).double(), scale)[0]
    torch.testing.assert_close(found, -0.1 * (masks * xs).sum(1) @ torch.arange(3.0).double())


def of_half(adjoint: Any, loop: bool, backward: bool) -> tuple[list[Tensor], int]:
    """Gradients of a loss in bfloat16, if autocast is on in the loop, or in backward; and how many leaves are left."""
    torch.manual_seed(0)
    x, first = torch.randn(6, 3), torch.randn(3, 2, requires_grad=True)
    weights, lr = torch.rand(6, requires_grad=True), torch.tensor(0.1, requires_grad=True)
    seen = []

    def loss(w):
        seen.append(weakref.ref(w))
        return (weights[:, None] * (x @ w).float() ** 2).mean()

    with torch.autocast("cpu", torch.bfloat16, enabled=loop):
        params = todist.inner_loop(loss, todist.sgd(lr=lr), first, 9, meta=weights, adjoint=adjoint).params
        left = sum(leaf() is not None for leaf in seen)
    with torch.autocast("cpu", torch.bfloat16, enabled=backward):
        found = torch.autograd.grad(params.square().sum(), (weights, lr), allow_unused=True)
        left += sum(leaf() is not None for leaf in seen)
    return list(found), left


@pytest.mark.parametrize("name", [*ESTIMATORS, "replayed from snapshots"])
def test_steps_are_run_again_under_the_autocast_of_the_loop_which_keeps_the_casts_of_one(name):
    damped = todist.linear_solve.solve_cg(ridge=1.0, rtol=1e-3)
    adjoint = todist.Implicit(damped) if name == "implicit" else ALL[name]
    found = {pair: of_half(adjoint, *pair) for pair in itertools.product((False, True), repeat=2)}
    for loop in (False, True):
        torch.testing.assert_close(found[loop, not loop][0], found[loop, loop][0], rtol=0, atol=0)
    assert not torch.equal(found[True, True][0][0], found[False, False][0][0])
    assert found[True, True][1] <= 4


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo's, which it hides itself
@pytest.mark.parametrize("name", ["SAMA", "implicit", "persistent evolution strategies"])
def test_a_compiled_function_has_the_estimate_of_the_plain_one(name):
    problem = Regression()

    def outer(first):
        adapted = todist.inner_loop(
            problem.loss, todist.sgd(lr=0.1), first, 2, meta=problem.weights, adjoint=ESTIMATORS[name]
        )
        return (adapted.params**2).sum() * 3

    found = []
    for function in (outer, torch.compile(outer, backend="eager")):
        torch.manual_seed(0)
        value = function(problem.first)
        found.append([value, *torch.autograd.grad(value, problem.weights)])
    torch.compiler.reset()
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=0)


@pytest.mark.parametrize("outer", [lambda w: (w**2).sum(), lambda w: w.sum()], ids=["square", "linear"])
@pytest.mark.parametrize("name", [*FINITE, *SAMPLED])
def test_a_second_derivative_is_refused(name, outer):
    """Of a linear outer loss, too, whose own gradient is a constant: what is missing must not go unnoticed."""
    problem = Regression()
    adapted = problem.run(ESTIMATORS[name], todist.sgd(lr=0.1), 2).params
    (found,) = torch.autograd.grad(outer(adapted), problem.weights, create_graph=True)
    with pytest.raises(NotImplementedError, match=f"`{type(ESTIMATORS[name]).__name__}` is an estimate"):
        (found.sum() + problem.weights.sum()).backward()


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: todist.FiniteDifference("small"), TypeError, "`eps` must be a number, got str"),
        (lambda: todist.FiniteDifference(0.0), ValueError, "`eps` must be finite and above 0, got 0.0"),
        (lambda: todist.SAMA(math.nan), ValueError, "`alpha` must be finite and above 0, got nan"),
        (lambda: todist.SAMA(True), TypeError, "`alpha` must be a number, got bool"),
        (lambda: todist.Implicit(3), TypeError, "`solve` must be a solver, a function"),
        (lambda: todist.Implicit(batches=0), ValueError, "`batches` must be at least 1, got 0"),
        (lambda: todist.EvolutionStrategies(0, 0.1), ValueError, "`samples` must be at least 1, got 0"),
        (lambda: todist.EvolutionStrategies(1.5, 0.1), TypeError, "`samples` must be an integer, got float"),
        (lambda: todist.EvolutionStrategies(1, -1), ValueError, "`sigma` must be finite and above 0, got -1"),
        (lambda: todist.EvolutionStrategies(1, 0.1, 2), TypeError, "`parallel` must be a decorator, got 2"),
        (
            lambda: todist.PersistentEvolutionStrategies(1, 0.1, unroll=0),
            ValueError,
            "`unroll` must be at least 1, got 0",
        ),
    ],
)
def test_bad_settings(call, kind, message):
    with pytest.raises(kind, match=message):
        call()
