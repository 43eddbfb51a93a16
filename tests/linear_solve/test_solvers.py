"""Every solver, one row each: solutions, information, derivatives to order 2, batches, trees, and what it refuses."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import torchopt_dist as todist
from tests.rows import each_row
from torchopt_dist import linear_solve
from torchopt_dist.linear_solve import ConvergenceWarning

N = 3
TIGHT = {"rtol": 1e-13}
SOLVERS = {
    "cg": linear_solve.solve_cg(**TIGHT),
    "normal_cg": linear_solve.solve_normal_cg(**TIGHT),
    "inv": linear_solve.solve_inv(),
    "neumann": linear_solve.solve_neumann(alpha=0.4, maxiter=1000, **TIGHT),
    "gmres": linear_solve.solve_gmres(**TIGHT),
    "bicgstab": linear_solve.solve_bicgstab(**TIGHT),
}
ANY_MATRIX = ["normal_cg", "inv", "neumann", "gmres", "bicgstab"]
every_solver = each_row("name", SOLVERS)


def double(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def spd(seed=0):
    a = 0.5 * double(N, N, seed=seed)
    return a @ a.T + torch.eye(N, dtype=a.dtype)


def symmetrized(A):
    return (A + A.mT) / 2


def closing(solver, A, b):
    A = symmetrized(A)
    return solver(lambda v: A @ v, b)


def given(solver, A, b):
    return solver(functools.partial(lambda A, v: A @ v, symmetrized(A)), b)


@every_solver
def test_solution_and_information(name):
    A, b = spd(), double(N, seed=1)
    x, info = SOLVERS[name].with_info(lambda v: A @ v, b)
    torch.testing.assert_close(x, torch.linalg.solve(A, b))
    assert info.converged.all()
    assert info.residual < 1e-11
    assert info.iterations.dtype == torch.int64
    assert int(info.iterations) <= {"cg": N + 1, "normal_cg": N + 1, "inv": 0, "neumann": 1000}.get(
        name, N + 1
    )


@each_row("name", ANY_MATRIX)
def test_a_matrix_that_is_not_symmetric(name):
    A, b = spd() + 0.3 * double(N, N, seed=2), double(N, seed=1)
    solver = SOLVERS[name]
    torch.testing.assert_close(solver(lambda v: A @ v, b), torch.linalg.solve(A, b))
    assert gradcheck(lambda A, b: solver(lambda v: A @ v, b), (A.requires_grad_(), b.requires_grad_()))


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize("call", [closing, given])
def test_derivatives_to_order_two(name, call):
    A, b = spd().requires_grad_(), double(N, seed=1).requires_grad_()
    assert gradcheck(functools.partial(call, SOLVERS[name]), (A, b))
    assert gradgradcheck(functools.partial(call, SOLVERS[name]), (A, b))


@every_solver
@each_row("call", [closing, given])
def test_under_torch_func(name, call):
    solve, exact = functools.partial(call, SOLVERS[name]), lambda A, b: torch.linalg.solve(symmetrized(A), b)
    A = torch.stack([spd(), 0.5 * spd(seed=3) + 0.5 * torch.eye(N)])
    b = double(2, N, seed=1)
    torch.testing.assert_close(torch.vmap(solve)(A, b), exact(A, b))
    torch.testing.assert_close(torch.vmap(solve, in_dims=(0, None))(A, b[0]), exact(A, b[:1].expand(2, N)))
    torch.testing.assert_close(torch.vmap(solve, in_dims=(None, 0))(A[0], b), exact(A[:1].expand(2, N, N), b))
    for function in (torch.func.jacrev, lambda f: torch.func.jacrev(torch.func.jacrev(f))):
        torch.testing.assert_close(torch.vmap(function(solve))(A, b), torch.vmap(function(exact))(A, b))


def test_a_vmap_in_a_vmap_and_its_information():
    A = torch.stack([spd(seed) for seed in range(4)]).reshape(2, 2, N, N)
    b = double(2, 2, N)
    solver = linear_solve.solve_cg(**TIGHT)
    x, info = torch.vmap(torch.vmap(lambda A, b: solver.with_info(lambda v: A @ v, b)))(A, b)
    torch.testing.assert_close(x, torch.linalg.solve(A, b))
    assert info.residual.shape == info.iterations.shape == (2, 2)


def test_the_third_derivative():
    def cube(x):
        return linear_solve.solve_cg(**TIGHT)(lambda v: v / x, torch.ones((), dtype=x.dtype)) ** 3

    x = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    y = cube(x)
    for expected in (12.0, 12.0, 6.0):
        (y,) = torch.autograd.grad(y, x, create_graph=True)
        assert y.item() == pytest.approx(expected)


@each_row("closes_over", [False, True])
def test_a_solve_under_a_checkpoint(closes_over):
    A, b = spd().requires_grad_(), double(N, seed=1).requires_grad_()
    solve = linear_solve.solve_cg(rtol=1e-13)

    def solution(A, b):
        return solve((lambda v: A @ v) if closes_over else functools.partial(torch.mv, A), b)

    found = []
    for call in (
        solution,
        functools.partial(torch.utils.checkpoint.checkpoint, solution, use_reentrant=False),
    ):
        found.append(torch.autograd.grad((call(A, b) ** 3).sum(), (A, b)))
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-14)


def test_what_a_product_finds_in_the_graph_gets_its_gradient():
    """A Hessian's product by ``autograd.grad`` of a gradient that was recorded outside."""
    w = double(N).requires_grad_()
    theta = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    b = double(N, seed=1)

    def implicit(w, theta):
        scale = theta.exp()
        (gradient,) = torch.autograd.grad((scale * w**4 + w**2).sum(), w, create_graph=True)
        return linear_solve.solve_cg(**TIGHT)(
            lambda v: torch.autograd.grad(gradient, w, v, retain_graph=True, create_graph=True)[0], b
        )

    def exact(w, theta):
        return b / (12 * theta.exp() * w**2 + 2)

    for order in (1, 2):
        ours, true = implicit(w, theta).pow(2).sum(), exact(w, theta).pow(2).sum()
        for _ in range(order - 1):
            ours, true = (
                sum(g.sum() for g in torch.autograd.grad(y, (w, theta), create_graph=True))
                for y in (ours, true)
            )
        torch.testing.assert_close(
            torch.autograd.grad(ours, (w, theta)), torch.autograd.grad(true, (w, theta))
        )


@every_solver
def test_all_blocks_of_a_tree(name):
    """Leaves of different shapes, a scalar among them, and a matrix that couples them."""
    A, b = spd(), double(N, seed=1)
    tree = {"w": b[:2].reshape(2, 1), "b": b[2]}

    def matvec(v):
        product = A @ torch.cat([v["w"].flatten(), v["b"].reshape(1)])
        return {"w": product[:2].reshape(2, 1), "b": product[2]}

    x = SOLVERS[name](matvec, tree)
    assert x["b"].shape == ()
    torch.testing.assert_close(torch.cat([x["w"].flatten(), x["b"].reshape(1)]), torch.linalg.solve(A, b))


@every_solver
def test_complex_matrices(name):
    A, b = spd().to(torch.complex128), double(N, seed=1) + 1j * double(N, seed=2)
    A = A + 0.2j * torch.tensor([[0, 1, 0], [-1, 0, 1], [0, -1, 0]])
    solver = SOLVERS[name]
    torch.testing.assert_close(solver(lambda v: A @ v, b), torch.linalg.solve(A, b))
    assert gradcheck(lambda b: solver(lambda v: A @ v, b), b.requires_grad_())


@every_solver
def test_ridge_is_added_and_differentiated(name):
    A, b, identity = spd().requires_grad_(), double(N, seed=1), torch.eye(N, dtype=torch.float64)
    ridge = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    kind = type(SOLVERS[name])
    settings = {} if name == "inv" else TIGHT
    if name == "neumann":
        settings = {"alpha": 0.4, "maxiter": 1000, **TIGHT}

    def solve(ridge):
        return closing(kind(ridge=ridge, **settings), A, b)

    def exact(ridge):
        M = symmetrized(A)
        if name == "normal_cg":
            return torch.linalg.solve(M.T @ M + ridge * identity, M.T @ b)
        return torch.linalg.solve(M + ridge * identity, b)

    def derivatives(x):  # of a matrix that the function closes over, too
        found = torch.autograd.grad(x.sin().sum(), (ridge, A), create_graph=True)
        return [x, *found, *torch.autograd.grad(sum((one**2).sum() for one in found), (ridge, A))]

    torch.testing.assert_close(solve(0.3), exact(0.3))
    assert gradcheck(solve, ridge)
    expected = derivatives(exact(ridge))
    for found, other in zip(derivatives(solve(ridge)), expected, strict=True):
        torch.testing.assert_close(found, other)


@each_row("name", ["cg", "normal_cg", "gmres", "bicgstab"])
@each_row("how", ["jacobi", "known", "batched"])
def test_preconditioners_save_iterations(name, how):
    scale = torch.logspace(0, 4, 20, dtype=torch.float64)
    A = torch.diag(scale) + 0.01 * torch.ones(20, 20, dtype=torch.float64)
    b = double(20)
    diagonal = A.square().sum(0) if name == "normal_cg" else A.diagonal()
    M = linear_solve.jacobi(diagonal) if how == "known" else "jacobi"
    kind = type(SOLVERS[name])
    solve = functools.partial(kind(rtol=1e-10, M=M).with_info, lambda v: A @ v)
    x, info = solve(b) if how != "batched" else torch.vmap(solve)(b.expand(2, 20))
    _, without = kind(rtol=1e-10, not_converged="ignore").with_info(lambda v: A @ v, b)
    torch.testing.assert_close(x, torch.linalg.solve(A, b).expand(x.shape), rtol=1e-6, atol=1e-8)
    assert info.iterations.max() < without.iterations / 2


@each_row("name", ["cg", "normal_cg", "gmres", "bicgstab"])
def test_a_start_at_the_solution_needs_no_iteration(name):
    A, b = spd(), double(N, seed=1)
    solver = type(SOLVERS[name])(init=torch.linalg.solve(A, b), rtol=1e-8)
    x, info = solver.with_info(lambda v: A @ v, b)
    assert int(info.iterations) == 0
    torch.testing.assert_close(x, torch.linalg.solve(A, b))


def test_the_default_number_of_iterations_counts_elements():
    """A matrix as the unknown: 32 x 32 elements, not 2 dimensions."""
    scale = torch.logspace(0, 3, 1024, dtype=torch.float64).reshape(32, 32)
    b = torch.ones(32, 32, dtype=torch.float64)
    x = linear_solve.solve_cg()(lambda v: scale * v, b)
    assert (scale * x - b).norm() <= 1e-5 * b.norm() * 1.01


def test_gmres_goes_on_after_a_restart():
    A = torch.diag(torch.linspace(1, 3, 30, dtype=torch.float64)) + 0.05 * double(30, 30)
    b = double(30, seed=1)
    x, info = linear_solve.solve_gmres(restart=4, rtol=1e-10).with_info(lambda v: A @ v, b)
    torch.testing.assert_close(x, torch.linalg.solve(A, b))
    assert int(info.iterations) > 4


@every_solver
def test_zeros_are_solved_by_zeros(name):
    A = spd()
    x, info = SOLVERS[name].with_info(lambda v: A @ v, torch.zeros(N, dtype=torch.float64))
    assert torch.equal(x, torch.zeros(N, dtype=torch.float64))
    assert info.converged


@every_solver
def test_leaves_of_several_precisions_keep_theirs(name):
    A, b = spd(), double(N, seed=1)
    tree = (b[:1].float(), b[1:])
    solver = type(SOLVERS[name])(alpha=0.4) if name == "neumann" else type(SOLVERS[name])()

    def matvec(v):
        product = A @ torch.cat([v[0].double(), v[1]])
        return product[:1].float(), product[1:]

    x = solver(matvec, tree)
    assert [leaf.dtype for leaf in x] == [torch.float32, torch.float64]
    torch.testing.assert_close(
        torch.cat([x[0].double(), x[1]]), torch.linalg.solve(A, b), rtol=1e-3, atol=1e-3
    )


INDEFINITE = torch.tensor([[1.0, 0.0], [0.0, -1.0]])
SINGULAR = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
ONES = torch.ones(2)


@each_row(
    ("solver", "A", "message"),
    [
        (linear_solve.solve_cg(), INDEFINITE, "need a symmetric positive definite matrix, and met"),
        (linear_solve.solve_cg(), SINGULAR, "need a symmetric positive definite matrix, and met"),
        (linear_solve.solve_inv(), SINGULAR, "needs a matrix that is not singular"),
        (
            linear_solve.solve_neumann(),
            -3 * torch.eye(2),
            "NeumannSeries diverged, its result is worse than zeros",
        ),
        (linear_solve.solve_bicgstab(), torch.tensor([[0.0, 1.0], [-1.0, 0.0]]), "BiCGSTAB broke down"),
        (linear_solve.solve_cg(), torch.full((2, 2), torch.nan), "positive definite"),
        (linear_solve.solve_gmres(), 0 * torch.eye(2), "GMRES makes no progress"),
        (linear_solve.solve_cg(M="jacobi"), SINGULAR, "without zeros on its diagonal, got one with "),
    ],
)
def test_a_solve_that_fails_is_an_error(solver, A, message):
    with pytest.raises(torch.linalg.LinAlgError, match=message):
        solver(lambda v: A @ v, ONES)
    with pytest.raises(torch.linalg.LinAlgError, match=message):
        torch.vmap(lambda b: solver(lambda v: A @ v, b))(torch.stack([ONES, ONES]))


@each_row("kind", [linear_solve.solve_cg, linear_solve.solve_gmres, linear_solve.solve_neumann])
def test_a_solution_that_is_not_accurate_warns_with_its_residual(kind):
    A, b = torch.diag(torch.linspace(0.1, 1.0, 20)), torch.ones(20)
    with pytest.warns(
        ConvergenceWarning, match=r"after 3 iterations with a residual of 0\.\d+ of ‖b‖; the limits are"
    ):
        kind(maxiter=3)(lambda v: A @ v, b)
    x, info = kind(maxiter=3, not_converged="ignore").with_info(lambda v: A @ v, b)
    assert not info.converged
    torch.testing.assert_close(info.residual, (b - A @ x).norm())
    with pytest.raises(torch.linalg.LinAlgError, match="maxiter=3"):
        kind(maxiter=3, not_converged="raise")(lambda v: A @ v, b)


def test_least_squares_of_a_singular_matrix():
    x = linear_solve.solve_normal_cg()(lambda v: SINGULAR @ v, ONES)
    torch.testing.assert_close(x, torch.tensor([1.0, 0.0]))


@each_row(
    ("call", "kind", "message"),
    [
        (lambda: linear_solve.solve_cg(rtol=-1.0), ValueError, "`rtol` must be at least 0, got -1.0"),
        (lambda: linear_solve.solve_cg(atol=torch.nan), ValueError, "`atol` must be at least 0, got nan"),
        (lambda: linear_solve.solve_cg(maxiter=0), ValueError, "`maxiter` must be an integer of at least 1"),
        (lambda: linear_solve.solve_cg(ridge=-0.1), ValueError, "`ridge` must be at least 0, got -0.1"),
        (lambda: linear_solve.solve_cg(ridge=ONES), ValueError, "`ridge` as a tensor must have one element"),
        (lambda: linear_solve.solve_cg(M="ilu"), TypeError, "`M` must be a function, 'jacobi' or None"),
        (lambda: linear_solve.solve_cg(not_converged="no"), ValueError, "`not_converged` must be 'warn'"),
        (lambda: linear_solve.solve_neumann(alpha=0.0), ValueError, "`alpha` must be above 0, got 0.0"),
        (lambda: linear_solve.solve_gmres(restart=0), ValueError, "`restart` must be at least 1, got 0"),
        (
            lambda: linear_solve.solve_gmres(rtool=0.1),
            TypeError,
            "solve_gmres got an unexpected keyword argument 'rtool': did you mean `rtol`?",
        ),
        (
            lambda: linear_solve.solve_neumann(M="jacobi"),
            TypeError,
            "its options are alpha, ridge, rtol, atol, maxiter, not_converged$",
        ),
        (
            lambda: linear_solve.solve_bicgstab(0.1),
            TypeError,
            "takes 0 without a name, got 1: by their names it takes ridge, rtol,",
        ),
        (
            lambda: linear_solve.solve_inv()(lambda v: v, [ONES, ONES * 1j]),
            TypeError,
            "`b` must have either real or complex leaves, got both",
        ),
        (
            lambda: linear_solve.solve_cg()(SINGULAR, ONES),
            TypeError,
            "`matvec` must be a function, got Tensor",
        ),
        (
            lambda: linear_solve.solve_cg()(lambda v: v, [1, 2]),
            TypeError,
            "`b` must be a tree of floating-point",
        ),
        (
            lambda: linear_solve.solve_cg()(lambda v: v, torch.ones(2).long()),
            TypeError,
            "a leaf of torch.int64",
        ),
        (lambda: linear_solve.solve_cg()(lambda v: v, ()), ValueError, "`b` must have at least one tensor"),
        (
            lambda: linear_solve.solve_cg()(lambda v: [v], ONES),
            ValueError,
            "`matvec.b.` must have the structure of `b`",
        ),
        (
            lambda: linear_solve.solve_cg()(lambda v: v[:1], ONES),
            ValueError,
            r"a leaf of shape \(2,\) became one of",
        ),
        (
            lambda: linear_solve.solve_cg(init=[ONES])(lambda v: v, ONES),
            ValueError,
            "`init` must have the structure",
        ),
    ],
)
def test_bad_input(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


def test_a_transform_may_be_applied_to_a_captured_tensor_inside_another():
    def solve(w):
        def hessian_product(v):
            return torch.func.vjp(torch.func.grad(lambda w: (w**4).sum()), w)[1](v)[0]

        return linear_solve.solve_cg(**TIGHT)(hessian_product, torch.ones_like(w))

    w = torch.tensor([[1.0, 2.0], [3.0, 1.0]], dtype=torch.float64)
    torch.testing.assert_close(torch.vmap(solve)(w), 1 / (12 * w**2))
    torch.testing.assert_close(torch.func.grad(lambda w: solve(w).sum())(w[0]), -1 / (6 * w[0] ** 3))


def test_a_partial_may_apply_transforms():
    def hessian_product(w, v):
        return torch.func.vjp(torch.func.grad(lambda w: (w**4).sum()), w)[1](v)[0]

    def solve(w):
        return linear_solve.solve_cg(**TIGHT)(functools.partial(hessian_product, w), torch.ones_like(w))

    w = torch.tensor([[1.0, 2.0], [3.0, 1.0]], dtype=torch.float64)
    torch.testing.assert_close(torch.vmap(solve)(w), 1 / (12 * w**2))
    torch.testing.assert_close(torch.func.grad(lambda w: solve(w).sum())(w[0]), -1 / (6 * w[0] ** 3))
    assert gradgradcheck(solve, w[0].requires_grad_())


def test_solvers_are_public():
    assert isinstance(todist.linear_solve.solve_cg(), todist.linear_solve.Solver)
