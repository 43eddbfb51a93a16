"""A bare call of a nonlinear solver is differentiated by its equation, in programs as they are written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

from tests.nonlinear_solve.test_nonlinear_solvers import FIXED_POINTS, SOLVERS, START, TIGHT, B, W, cell
from tests.rows import each_row
from torchopt_dist import linear_solve, nonlinear_solve
from torchopt_dist.diff.implicit import custom_fixed_point

DOUBLE = torch.float64
SOLVE = linear_solve.solve_inv()


def of(name: str, **options: Any) -> Any:
    """The solver of a row, with other options."""
    return replace(SOLVERS[name], **{"solve": SOLVE, **options})


def solved(name: str, start: Tensor, W: Tensor, b: Tensor, **options: Any) -> Any:
    fixed = name in FIXED_POINTS
    return of(name, **options)(lambda z: cell(z, W, b) if fixed else z - cell(z, W, b), start)


@pytest.mark.parametrize("name", SOLVERS)
def test_derivatives_of_orders_one_and_two(name: str) -> None:
    arguments = (W.clone().requires_grad_(), B.clone().requires_grad_())
    assert gradcheck(lambda W, b: solved(name, START, W, b), arguments)
    assert gradgradcheck(lambda W, b: solved(name, START, W, b), arguments)


@each_row("name", SOLVERS)
def test_closed_forms_to_order_three_and_none_for_the_start(name: str) -> None:
    b = torch.tensor([1.5], dtype=DOUBLE, requires_grad=True)
    start = torch.ones(1, dtype=DOUBLE, requires_grad=True)
    fixed = name in FIXED_POINTS
    # sqrt(b), as the fixed point of the Babylonian step, or as a root
    z = of(name, maxiter=500)(lambda z: (z + b / z) / 2 if fixed else z - 0.5 * (z + b / z), start)
    torch.testing.assert_close(z, b.sqrt())
    found = z
    for expected in (0.5 * b**-0.5, -0.25 * b**-1.5, 0.375 * b**-2.5):
        (found,) = torch.autograd.grad(found.sum(), b, create_graph=True)
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)
    assert torch.autograd.grad(z, start, allow_unused=True)[0] is None


@each_row("name", ["iteration", "anderson", "newton", "broyden"])
def test_far_from_its_limit_an_iteration_says_so_and_unrolling_is_another_gradient(name: str) -> None:
    b = torch.ones(1, dtype=DOUBLE, requires_grad=True)
    start = torch.zeros(1, dtype=DOUBLE, requires_grad=True)
    fixed = name in FIXED_POINTS
    options: dict[str, Any] = {"maxiter": 2, "not_converged": "ignore"}

    def gradients(**more: Any) -> list[Any]:
        z = of(name, **options, **more)(
            lambda z: 0.5 * torch.sin(z) + b if fixed else z - 0.5 * torch.sin(z) - b, start
        )
        return [z, *torch.autograd.grad(z, (b, start), allow_unused=True)]

    z, of_b, of_start = gradients()
    torch.testing.assert_close(
        of_b, 1 / (1 - 0.5 * torch.cos(z.detach()))
    )  # of the equation, at the point reached
    assert of_start is None
    same, unrolled, of_start = gradients(unroll=True)
    torch.testing.assert_close(same, z)
    assert not torch.allclose(unrolled, of_b)
    assert of_start is not None


def test_a_tanh_cell_of_a_module_agrees_with_custom_fixed_point_and_a_dense_solve() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(6, 6).double()
    with torch.no_grad():
        layer.weight.mul_(0.5)
    u = torch.randn(5, 6, dtype=DOUBLE, requires_grad=True)
    weight = torch.randn(5, 6, dtype=DOUBLE)
    solver = nonlinear_solve.anderson(**TIGHT, solve=linear_solve.solve_gmres(rtol=1e-12))
    z, info = solver.with_info(lambda z: torch.tanh(layer(z) + u), torch.zeros(5, 6, dtype=DOUBLE))
    assert info.backward == []
    given = [layer.weight, layer.bias, u]
    found = torch.autograd.grad(z, given, weight)
    assert [bool(one.converged) for one in info.backward] == [True]
    assert info.backward[0].residual < 1e-10

    @custom_fixed_point(lambda z, w, b, u: torch.tanh(z @ w.T + b + u), (1, 2, 3), solve=SOLVE)
    def by_hand(z: Tensor, w: Tensor, b: Tensor, u: Tensor) -> Tensor:
        for _ in range(200):
            z = torch.tanh(z @ w.T + b + u)
        return z

    expected = torch.autograd.grad(by_hand(torch.zeros_like(u), *given), given, weight)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


def test_tasks_in_a_for_with_names_bound_anew_before_backward() -> None:
    theta = torch.tensor([0.3, -0.2], dtype=DOUBLE, requires_grad=True)
    x = torch.empty(0)

    def residual(z: Tensor) -> Tensor:
        return z - 0.5 * torch.sin(z) - theta * x  # `x` is another tensor when backward runs

    total, by_hand = torch.zeros((), dtype=DOUBLE), torch.zeros((), dtype=DOUBLE)
    for shift in (0.1, 0.7, -0.4):
        x = torch.full((2,), shift, dtype=DOUBLE)
        total = total + nonlinear_solve.newton(**TIGHT)(residual, torch.zeros(2, dtype=DOUBLE)).square().sum()
        z = torch.zeros(2, dtype=DOUBLE)
        for _ in range(100):
            z = 0.5 * torch.sin(z) + theta * x
        by_hand = by_hand + z.square().sum()
    found, expected = (torch.autograd.grad(one, theta)[0] for one in (total, by_hand))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


@each_row("name", ["iteration", "anderson", "newton", "broyden"])
def test_transforms(name: str) -> None:
    bs = torch.stack([B, 2 * B, -2 * B])

    def value(W: Tensor, b: Tensor) -> Tensor:
        return solved(name, START, W, b).square().sum()

    at_once = torch.func.vmap(torch.func.grad(value, argnums=(0, 1)), (None, 0))(W, bs)
    for row, b in enumerate(bs):
        given = (W.clone().requires_grad_(), b.clone().requires_grad_())
        expected = torch.autograd.grad(value(*given), given)
        for one, other in zip(at_once, expected, strict=True):
            torch.testing.assert_close(one[row], other, rtol=1e-7, atol=1e-9)
    jacobian = torch.func.jacrev(lambda b: solved(name, START, W, b))(B)
    rows = torch.autograd.functional.jacobian(lambda b: solved(name, START, W, b), B)
    torch.testing.assert_close(jacobian, rows, rtol=1e-7, atol=1e-9)
    leaf = W.clone().requires_grad_()  # autograd outside of `vmap`
    outer = torch.func.vmap(value, (None, 0))(leaf, bs).sum()
    torch.testing.assert_close(torch.autograd.grad(outer, leaf)[0], at_once[0].sum(0), rtol=1e-7, atol=1e-9)


def test_nothing_is_recorded_without_grad_mode_or_without_tensors_that_want_a_gradient() -> None:
    solver = nonlinear_solve.fixed_point_iteration(**TIGHT)
    b = B.clone().requires_grad_()
    with torch.no_grad():
        assert not solver(lambda z: cell(z, W, b), START).requires_grad
    assert not solver(lambda z: cell(z, W, B), START).requires_grad
    z = solver(lambda z: cell(z, W, b), START)
    assert len({node for node, _ in z.grad_fn.next_functions}) <= 3  # one node, not one for each iteration


def test_what_was_computed_before_may_not_be_differentiated_inside() -> None:
    x = torch.ones(2, dtype=DOUBLE, requires_grad=True)
    energy = (x**2).sum()

    def residual(z: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(energy, x, create_graph=True)
        return z - 0.1 * slope

    with pytest.raises(ValueError, match="must not differentiate what was computed before the solver's call"):
        nonlinear_solve.newton()(residual, torch.zeros(2, dtype=DOUBLE))
    z = nonlinear_solve.newton(unroll=True)(residual, torch.zeros(2, dtype=DOUBLE))
    torch.testing.assert_close(torch.autograd.grad(z.sum(), x)[0], torch.full_like(x, 0.2))


def test_bad_options() -> None:
    with pytest.raises(TypeError, match="`unroll` must be True or False, got 'no'"):
        nonlinear_solve.anderson(unroll="no")
    with pytest.raises(
        TypeError, match=r"got the function solve_cg, which makes one: call it, `solve_cg\(\)`"
    ):
        nonlinear_solve.newton(solve=linear_solve.solve_cg)
