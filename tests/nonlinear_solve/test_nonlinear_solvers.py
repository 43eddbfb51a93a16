"""Every solver of fixed points and roots: solutions, information, batches, both kinds of gradients, failures."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.autograd import gradcheck

from tests.optim.graph import count_nodes
from tests.rows import each_row
from torchopt_dist import linear_solve, nonlinear_solve
from torchopt_dist.diff.implicit import custom_fixed_point, custom_root
from torchopt_dist.linear_solve import ConvergenceWarning

TIGHT = {"rtol": 1e-12, "atol": 1e-13}
FIXED_POINTS = {
    "iteration": nonlinear_solve.fixed_point_iteration(**TIGHT),
    "damped": nonlinear_solve.fixed_point_iteration(damping=0.7, maxiter=200, **TIGHT),
    "anderson": nonlinear_solve.anderson(**TIGHT),
    "anderson of one": nonlinear_solve.anderson(history=1, damping=0.9, **TIGHT),
}
ROOTS = {
    "newton": nonlinear_solve.newton(**TIGHT),
    "newton by gmres": nonlinear_solve.newton(linear_solver=linear_solve.solve_gmres(rtol=1e-10), **TIGHT),
    "broyden": nonlinear_solve.broyden(**TIGHT),
    "broyden that forgets": nonlinear_solve.broyden(history=3, **TIGHT),
}
SOLVERS = {**FIXED_POINTS, **ROOTS}
W = 0.35 * torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
B = torch.randn(4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
START = torch.zeros(4, dtype=torch.float64)


def cell(z, W, b):
    return torch.tanh(W @ z + b)


def solved(name, start, W, b):
    if name in FIXED_POINTS:
        return SOLVERS[name].with_info(lambda z: cell(z, W, b), start)
    return SOLVERS[name].with_info(lambda z: z - cell(z, W, b), start)


@each_row("name", SOLVERS)
def test_solution_and_information(name):
    z, info = solved(name, START, W, B)
    torch.testing.assert_close(z, cell(z, W, B), rtol=1e-10, atol=1e-10)
    assert info.converged
    assert info.residual <= 1e-12 * z.norm() + 1e-13
    assert 2 < int(info.iterations) < 150


def test_acceleration_accelerates_and_newton_is_quadratic():
    slow = 0.95 * torch.eye(4, dtype=torch.float64)
    counts = {
        name: int(kind.with_info(lambda z: slow @ z + B, START)[1].iterations)
        for name, kind in (
            ("plain", nonlinear_solve.fixed_point_iteration(maxiter=2000)),
            ("anderson", nonlinear_solve.anderson()),
        )
    }
    assert counts["anderson"] < counts["plain"] / 5
    assert int(solved("newton", START, W, B)[1].iterations) < 8


@each_row("name", SOLVERS)
def test_trees_and_shapes(name):
    def function(x):
        return {"a": torch.cos(x["a"]), "b": [0.5 * x["b"][0] + x["a"].sum()]}

    def root(x):
        value = function(x)
        return {"a": x["a"] - value["a"], "b": [x["b"][0] - value["b"][0]]}

    init = {"a": torch.ones(1, 2, dtype=torch.float64), "b": [torch.tensor(0.0, dtype=torch.float64)]}
    x = SOLVERS[name](function if name in FIXED_POINTS else root, init)
    torch.testing.assert_close(x["a"], torch.full((1, 2), 0.7390851332151607, dtype=torch.float64))
    torch.testing.assert_close(x["b"][0], 4 * x["a"][0, 0])


@each_row("name", [name for name in SOLVERS if name != "newton by gmres"])
def test_a_batch_under_vmap(name):
    b = torch.stack([B, -2 * B, 0 * B])
    z, info = torch.vmap(lambda b: solved(name, START, W, b))(b)
    assert info.residual.shape == info.iterations.shape == (3,)
    assert info.converged.all()
    for one, each in zip(z, b, strict=True):
        torch.testing.assert_close(one, solved(name, START, W, each)[0], rtol=1e-8, atol=1e-10)


@each_row("name", SOLVERS)
def test_implicit_gradients(name):
    kind = custom_fixed_point if name in FIXED_POINTS else custom_root
    function = cell if name in FIXED_POINTS else lambda z, W, b: z - cell(z, W, b)
    layer = kind(function, (1, 2), solve=linear_solve.solve_gmres(rtol=1e-13))(
        lambda z, W, b: solved(name, z, W, b)[0]
    )
    arguments = (W.clone().requires_grad_(), B.clone().requires_grad_())
    assert gradcheck(lambda W, b: layer(START, W, b), arguments)


@each_row("name", ["iteration", "anderson", "newton", "broyden"])
def test_unrolled_gradients_agree(name):
    def gradient(unroll):
        b = B.clone().requires_grad_()
        solver = replace(SOLVERS[name], unroll=unroll)
        z = solver(lambda z: cell(z, W, b) if name in FIXED_POINTS else z - cell(z, W, b), START)
        assert (count_nodes(z) > 20) is unroll
        return torch.autograd.grad(z.sum(), b)[0]

    torch.testing.assert_close(gradient(False), gradient(True), rtol=1e-6, atol=1e-8)


def test_a_solver_that_does_not_converge_says_so():
    for solver, message in (
        (nonlinear_solve.fixed_point_iteration(maxiter=3), "FixedPointIteration stopped after 3 iterations"),
        (nonlinear_solve.anderson(maxiter=1), "Anderson stopped after 1 iterations with a residual of 0"),
        (nonlinear_solve.broyden(maxiter=1), "Broyden stopped after 1 iterations"),
    ):
        function = torch.cos if not solver.solves_for_root else (lambda x: x - torch.cos(x))
        with pytest.warns(ConvergenceWarning, match=message):
            solver(function, torch.tensor(0.0))
    with pytest.raises(torch.linalg.LinAlgError, match="maxiter=3"):
        nonlinear_solve.fixed_point_iteration(maxiter=3, not_converged="raise")(torch.cos, torch.tensor(0.0))
    quiet = nonlinear_solve.fixed_point_iteration(maxiter=3, not_converged="ignore")
    assert not quiet.with_info(torch.cos, torch.tensor(0.0))[1].converged
    with pytest.raises(torch.linalg.LinAlgError, match="FixedPointIteration diverged"):
        nonlinear_solve.fixed_point_iteration(maxiter=1000)(lambda x: x**2, torch.tensor(3.0))
    with pytest.raises(torch.linalg.LinAlgError, match="singular"):
        nonlinear_solve.newton()(lambda x: 0 * x + 1, torch.tensor(1.0))


@each_row(
    ("call", "kind", "message"),
    [
        (lambda: nonlinear_solve.anderson(history=0), ValueError, "`history` must be at least 1, got 0"),
        (lambda: nonlinear_solve.anderson(ridge=0.0), ValueError, "`ridge` must be above 0, got 0.0"),
        (
            lambda: nonlinear_solve.anderson(damping=2.0),
            ValueError,
            "`damping` must be above 0 and at most 1",
        ),
        (lambda: nonlinear_solve.fixed_point_iteration(damping=0.0), ValueError, "`damping` must be above 0"),
        (lambda: nonlinear_solve.broyden(scale=0.0), ValueError, "`scale` must not be 0"),
        (lambda: nonlinear_solve.broyden(history=0), ValueError, "`history` must be at least 1, got 0"),
        (lambda: nonlinear_solve.newton(maxiter=0), ValueError, "`maxiter` must be an integer of at least 1"),
        (lambda: nonlinear_solve.newton(rtol=-1.0), ValueError, "`rtol` must be at least 0"),
        (
            lambda: nonlinear_solve.newton()(lambda x: x, 3.0),
            TypeError,
            "`init` must be a tree of floating-point",
        ),
        (
            lambda: nonlinear_solve.newton()(lambda x: x, ()),
            ValueError,
            "`init` must have at least one tensor",
        ),
        (
            lambda: nonlinear_solve.anderson()(lambda x: x[:1], START),
            ValueError,
            r"shape \(4,\) became one of shape",
        ),
        (
            lambda: nonlinear_solve.anderson()(lambda x: [x], START),
            ValueError,
            "must have the structure of `init`",
        ),
        (
            lambda: torch.vmap(lambda b: solved("newton by gmres", START, W, b))(B.expand(2, 4)),
            ValueError,
            "inside a `torch.func` transform Newton's method takes no `linear_solver`",
        ),
    ],
)
def test_bad_input(call, kind, message):
    with pytest.raises(kind, match=message):
        call()
