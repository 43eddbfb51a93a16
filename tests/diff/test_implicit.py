"""``custom_root`` and ``custom_fixed_point`` against closed forms, finite differences and unrolled steps."""

from __future__ import annotations

import functools

import optree
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import torchopt_dist as todist
from tests.processes import World
from tests.rows import each_row
from torchopt_dist import linear_solve, nonlinear_solve
from torchopt_dist.diff.implicit import custom_fixed_point, custom_root

SOLVES = {
    "default": None,
    "cg": linear_solve.solve_cg(rtol=1e-13),
    "inv": linear_solve.solve_inv(),
    "gmres": linear_solve.solve_gmres(rtol=1e-13),
    "bicgstab": linear_solve.solve_bicgstab(rtol=1e-13),
    "neumann": linear_solve.solve_neumann(alpha=0.2, rtol=1e-13, maxiter=2000),
    "a function": lambda matvec, b: linear_solve.solve_cg(rtol=1e-13)(matvec, b),
    "a function of the transpose": lambda matvec, b: linear_solve.solve_normal_cg(rtol=1e-13)(matvec, b),
}


def double(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def ridge_gradient(w, X, y, penalty):
    return X.mT @ (X @ w - y) + penalty.exp() * w


def exact_ridge(X, y, penalty):
    identity = torch.eye(X.shape[-1], dtype=X.dtype)
    return torch.linalg.solve(X.mT @ X + penalty.exp() * identity, X.mT @ y)


def ridge(solve=None, adjoint="implicit", argnums=(1, 2, 3), steps=400):
    @custom_root(ridge_gradient, argnums, solve=solve, adjoint=adjoint)
    def solver(w, X, y, penalty):
        for _ in range(steps):
            w = w - 0.15 * ridge_gradient(w, X, y, penalty)
        return w

    return solver


X, Y, PENALTY = 0.8 * double(5, 3), double(5, seed=1), torch.tensor(-0.5, dtype=torch.float64)
START = torch.zeros(3, dtype=torch.float64)


@each_row("name", SOLVES)
def test_closed_form_and_finite_differences_to_order_two(name):
    arguments = [t.clone().requires_grad_() for t in (X, Y, PENALTY)]
    # Differences are of solutions next to this one, where few steps will do.
    solve = functools.partial(ridge(SOLVES[name], steps=150), exact_ridge(X, Y, PENALTY))
    torch.testing.assert_close(solve(*arguments), exact_ridge(*arguments))
    for ours, true in zip(
        torch.autograd.grad(solve(*arguments).pow(2).sum(), arguments),
        torch.autograd.grad(exact_ridge(*arguments).pow(2).sum(), arguments),
        strict=True,
    ):
        torch.testing.assert_close(ours, true, rtol=1e-4, atol=1e-6)
    if name != "default":
        assert gradcheck(solve, arguments)
    if name in ("cg", "inv", "a function"):
        assert gradgradcheck(solve, arguments)


def test_implicit_and_unrolled_are_one_word_apart():
    arguments = [t.clone().requires_grad_() for t in (X, Y, PENALTY)]
    grads = [
        torch.autograd.grad(
            ridge(linear_solve.solve_cg(rtol=1e-12), adjoint)(START, *arguments).pow(2).sum(), arguments
        )
        for adjoint in ("implicit", "unrolled")
    ]
    for implicit, unrolled in zip(*grads, strict=True):
        torch.testing.assert_close(implicit, unrolled)


@each_row("solve", [None, linear_solve.solve_inv()])
def test_second_order_of_a_scalar(solve):
    """With x = θ², the second derivative of x³θ = θ⁷ at 3 is 42 · 3⁵ = 10206."""

    @custom_root(lambda x, theta: x - theta**2, argnums=1, solve=solve)
    def square(x, theta):
        return theta**2

    theta = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    y = square(torch.zeros_like(theta), theta) ** 3 * theta
    for expected in (7 * 3.0**6, 10206.0, 210 * 3.0**4):
        (y,) = torch.autograd.grad(y, theta, create_graph=True)
        assert y.item() == pytest.approx(expected)


@each_row("argnums", [1, 2, 3, (3,), (1, 3), [2, 3]])
def test_any_argnums_a_lone_later_one_too(argnums):
    arguments = [t.clone().requires_grad_() for t in (X, Y, PENALTY)]
    solution = ridge(linear_solve.solve_cg(rtol=1e-13), argnums=argnums)(START, *arguments)
    chosen = [argnums] if isinstance(argnums, int) else list(argnums)
    ours = torch.autograd.grad(solution.sum(), arguments, allow_unused=True)
    true = torch.autograd.grad(exact_ridge(*arguments).sum(), arguments)
    for place, (mine, theirs) in enumerate(zip(ours, true, strict=True), 1):
        if place in chosen:
            torch.testing.assert_close(mine, theirs)
        else:
            assert mine is None


def test_trees_keyword_arguments_and_aux():
    def optimality(x, params, *, factor):
        return {"a": x["a"] - factor * params["p"], "b": (x["b"][0] - params["q"][0] ** 2 - x["a"].sum(),)}

    @custom_root(optimality, argnums=1, has_aux=True)
    def solver(x, params, *, factor):
        a = factor * params["p"]
        return {"a": a, "b": (params["q"][0] ** 2 + a.sum(),)}, "said beside it"

    p, q = double(2).requires_grad_(), torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    init = {"a": torch.zeros(2), "b": (torch.tensor(0.0),)}
    x, aux = solver(init, params={"p": p, "q": [q], "name": "no tensor"}, factor=2.0)
    assert aux == "said beside it"
    grads = torch.autograd.grad(x["a"].sum() + x["b"][0], (p, q))
    torch.testing.assert_close(grads[0], torch.full((2,), 4.0).double())
    torch.testing.assert_close(grads[1], 2 * q.detach())


@each_row("solve", [linear_solve.solve_cg(rtol=1e-13), linear_solve.solve_inv(), SOLVES["a function"]])
def test_torch_func_and_vmap(solve):
    def solver(X, y, penalty):
        return ridge(solve)(START, X, y, penalty)

    for transform in (
        lambda f: torch.func.grad(lambda *a: f(*a).pow(2).sum(), argnums=(0, 1, 2)),
        lambda f: torch.func.jacrev(f, argnums=2),
        lambda f: torch.func.jacrev(torch.func.jacrev(f, argnums=2), argnums=2),
    ):
        for ours, true in zip(
            pytree_leaves(transform(solver)(X, Y, PENALTY)),
            pytree_leaves(transform(exact_ridge)(X, Y, PENALTY)),
            strict=True,
        ):
            torch.testing.assert_close(ours, true)
        batch = (X, torch.stack([Y, 2 * Y]), torch.stack([PENALTY, PENALTY + 1]))
        dims = (None, 0, 0)
        for ours, true in zip(
            pytree_leaves(torch.vmap(transform(solver), in_dims=dims)(*batch)),
            pytree_leaves(torch.vmap(transform(exact_ridge), in_dims=dims)(*batch)),
            strict=True,
        ):
            torch.testing.assert_close(ours, true)


def pytree_leaves(tree):
    return optree.tree_leaves(tree)


@each_row("nested", [False, True])
def test_samples_with_one_solution_in_common_have_gradients_of_their_own(nested):
    """The solver ignores its arguments, so ``vmap`` sees one solution, and not one for each sample."""
    root = custom_root(lambda x, a: x**2 - a, argnums=1)(lambda init, a: init)
    a, weights = (
        torch.full((4,), 9.0, dtype=torch.float64, requires_grad=True),
        torch.arange(4.0, dtype=torch.float64),
    )

    def solved(a):
        return root(torch.tensor(3.0, dtype=torch.float64), a)

    if nested:
        solutions = torch.vmap(torch.vmap(solved))(a.reshape(2, 2)).reshape(4)
        found = torch.vmap(torch.func.grad(lambda a, w: w * solved(a)))(a.detach(), weights)
        torch.testing.assert_close(found, weights / 6)
    else:
        solutions = torch.vmap(solved)(a)
    assert solutions.tolist() == [3.0] * 4
    (grad,) = torch.autograd.grad(solutions @ weights, a, create_graph=True)
    torch.testing.assert_close(grad, weights / 6)
    torch.testing.assert_close(torch.autograd.grad(grad.sum(), a)[0], -weights / 4 / 27)  # a ** -1.5


@each_row("order", [1, 2])
def test_an_argument_that_the_equation_does_not_use_has_zeros(order):
    @custom_root(lambda x, a, b: x**2 - a, argnums=(1, 2))
    def solver(x, a, b):
        return a.sqrt()

    a = torch.tensor(4.0, requires_grad=True)
    unused = torch.tensor(3.0, requires_grad=True)
    found = solver(torch.tensor(1.0), a, unused)
    for _ in range(order):
        (found, zero) = torch.autograd.grad(found, (a, unused), create_graph=True)
        assert zero == 0
    assert found.item() == pytest.approx([0.25, -1 / 32][order - 1])


def test_autograd_inside_the_optimality_function():
    """``torch.autograd.grad`` of an objective, as a program without ``torch.func`` writes it."""

    def objective(w, X, y, penalty):
        return 0.5 * (X @ w - y).square().sum() + 0.5 * penalty.exp() * w.square().sum()

    def optimality(w, *data):
        with torch.enable_grad():
            if not w.requires_grad:
                w = w.detach().requires_grad_()
            return torch.autograd.grad(objective(w, *data), w, create_graph=True)[0]

    @custom_root(optimality, argnums=3, solve=linear_solve.solve_cg(rtol=1e-13))
    def solver(w, X, y, penalty):
        return exact_ridge(X, y, penalty)

    penalty = PENALTY.clone().requires_grad_()
    assert gradgradcheck(lambda penalty: solver(START, X, Y, penalty), penalty)


def test_fixed_points_by_neumann_and_unrolled():
    W, b = 0.3 * double(3, 3), double(3, seed=1)

    def cell(z, W, b):
        return torch.tanh(W @ z + b)

    def iterate(z, W, b):
        for _ in range(80):
            z = cell(z, W, b)
        return z

    arguments = (W.requires_grad_(), b.requires_grad_())
    settings = {
        "neumann": {"solve": linear_solve.solve_neumann(rtol=1e-14, maxiter=300)},
        "gmres": {"solve": linear_solve.solve_gmres(rtol=1e-14)},
        "unrolled": {"adjoint": "unrolled"},
    }
    found = {}
    for name, options in settings.items():
        layer = custom_fixed_point(cell, (1, 2), **options)(iterate)
        found[name] = torch.autograd.grad(layer(START, *arguments).sum(), arguments)
    for name in ("neumann", "gmres"):
        for ours, true in zip(found[name], found["unrolled"], strict=True):
            torch.testing.assert_close(ours, true)
    layer = custom_fixed_point(cell, (1, 2), solve=settings["gmres"]["solve"])(iterate)
    assert gradgradcheck(lambda W, b: layer(START, W, b), arguments)


def test_an_implicit_layer_under_a_checkpoint():
    a = torch.tensor(9.0, dtype=torch.float64, requires_grad=True)
    root = custom_root(lambda x, a: x**2 - a, argnums=1)(lambda init, a: a.sqrt())

    def layer(a):
        return root(torch.tensor(1.0, dtype=torch.float64), a)

    value = torch.utils.checkpoint.checkpoint(layer, a, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(value, a)[0].item(), 1 / 6)


def by_newton(b):
    """``x**3 + x = b`` of a tree, whose gradient is implicit."""

    def equation(x, b):
        return {"p": x["p"] ** 3 + x["p"] - b[:1], "q": [x["q"][0] ** 3 + x["q"][0] - b[1:]]}

    solver = custom_root(equation, argnums=1)(
        lambda init, b: nonlinear_solve.newton(rtol=1e-12)(lambda x: equation(x, b), init)
    )
    return solver({"p": torch.ones_like(b[:1]), "q": [torch.ones_like(b[1:])]}, b)


def by_a_linear_solve(b):
    tree = {"p": b[:1], "q": [b[1:]]}
    return linear_solve.solve_cg(rtol=1e-12)(
        lambda v: {"p": 2 * v["p"], "q": [(2 + b[0] ** 2) * v["q"][0]]}, tree
    )


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo's, which it hides itself
@pytest.mark.parametrize("solved", [by_newton, by_a_linear_solve])
def test_a_compiled_function_may_solve_for_trees(solved):
    def value(b):
        x = solved(b * 1)
        return (x["p"].sum() * x["q"][0].sum()).sin() * 2

    b = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, requires_grad=True)
    found = [
        (y := function(b), *torch.autograd.grad(y, b))
        for function in (value, torch.compile(value, backend="eager"))
    ]
    torch.compiler.reset()
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=0)


def test_memory_is_flat_in_the_number_of_steps():
    """Nothing of the solver's steps is recorded, though they run under grad mode."""
    theta = torch.tensor(2.0, requires_grad=True)
    seen = []

    @custom_root(lambda x, theta: x**2 - theta, argnums=1)
    def root(x, theta):
        for _ in range(10):
            x = (x + theta / x) / 2
        seen.append((x.requires_grad, torch.is_grad_enabled()))
        return x

    y = root(torch.tensor(1.0), theta)
    assert seen == [(False, True)]
    assert len(y.grad_fn.next_functions) >= 1
    y.backward()
    assert theta.grad.item() == pytest.approx(0.5 / 2**0.5, rel=1e-4)


def products_on_workers():
    calls = []

    @todist.parallelize(todist.dim_partitioner(0, exclusive=False, keepdim=True), todist.sum_reducer)
    def data_gradient(w, X, y):
        return X.T @ (X @ w - y)

    def optimality(w, X, y, penalty):
        calls.append(1)
        shared = todist.replicated(w)
        return data_gradient(shared, X, y) + penalty.exp() * w

    @custom_root(optimality, argnums=(1, 2, 3), solve=linear_solve.solve_cg(rtol=1e-13))
    def solver(w, X, y, penalty):
        return exact_ridge(X, y, penalty)

    results = []
    for order in (1, 2):
        arguments = [t.clone().requires_grad_() for t in (X, Y, PENALTY)]
        calls.clear()
        loss = solver(START, *arguments).pow(2).sum()
        if order == 1:
            results.append((torch.autograd.grad(loss, arguments), len(calls)))
        else:
            (slope,) = torch.autograd.grad(loss, arguments[2], create_graph=True)
            results.append((torch.autograd.grad(slope, arguments[2]), len(calls)))
    return [(tuple(g.numpy() for g in grads), count) for grads, count in results]


def test_the_linear_system_is_solved_on_workers():
    (first, calls), (second, _) = World(2).on_zero(products_on_workers, timeout=200)
    assert calls == 1  # evaluated once, however many products
    arguments = [t.clone().requires_grad_() for t in (X, Y, PENALTY)]
    true = torch.autograd.grad(exact_ridge(*arguments).pow(2).sum(), arguments, create_graph=True)
    for ours, theirs in zip(first, true, strict=True):
        torch.testing.assert_close(torch.from_numpy(ours), theirs.detach())
    (curvature,) = torch.autograd.grad(true[2], arguments[2])
    torch.testing.assert_close(torch.as_tensor(second[0]), curvature)


def solved(optimality, argnums=1, **options):
    @custom_root(optimality, argnums, **options)
    def solver(x, theta):
        return theta * 1.0

    theta = torch.ones(2, requires_grad=True)
    return solver(torch.zeros(2), theta).sum().backward()


@each_row(
    ("call", "kind", "message"),
    [
        (lambda: solved(lambda x, t: x - t, 0), ValueError, "`argnums` must be positions of at least 1"),
        (
            lambda: solved(lambda x, t: x - t, (1, -1)),
            ValueError,
            "`argnums` must be positions of at least 1",
        ),
        (lambda: solved(lambda x, t: x - t, "1"), TypeError, "`argnums` must be an integer or a sequence"),
        (lambda: solved(lambda x, t: x - t, ()), TypeError, "`argnums` must be an integer or a sequence"),
        (
            lambda: solved(lambda x, t: x - t, 2),
            ValueError,
            "positions among the 2 arguments of the solver, got 2",
        ),
        (lambda: solved(lambda x, t: (x, t)), ValueError, "must have the structure of `solution`"),
        (
            lambda: solved(lambda x, t: (x - t).sum()),
            ValueError,
            r"the shapes of the solution: \(2,\), got \(\)",
        ),
        (
            lambda: solved(lambda x, t: x - t, has_aux=True),
            TypeError,
            "with `has_aux` the solver must return a pair",
        ),
        (
            lambda: solved(lambda x, t: x - t, adjoint="magic"),
            ValueError,
            "`adjoint` must be 'implicit' or 'unrolled'",
        ),
        (lambda: solved(lambda x, t: x - t, solve="cg"), TypeError, "`solve` must be a solver, a function"),
        (lambda: solved(3), TypeError, "`optimality_fn` must be a function, got int"),
        (lambda: custom_fixed_point(3, 1), TypeError, "`fixed_point_fn` must be a function, got int"),
        (lambda: custom_root(lambda x: x, 1)(3), TypeError, "`custom_root` decorates a function, got int"),
        (
            lambda: custom_root(lambda x, t: x - t, 1)(lambda x, t: 1.0)(torch.zeros(2), torch.ones(2)),
            TypeError,
            "the solution must be a tree of floating-point tensors, got a leaf of float",
        ),
        (
            lambda: solved(
                lambda x, t: torch.stack([x[0] - t[0], -(x[1] - t[1])]), solve=linear_solve.solve_cg()
            ),
            torch.linalg.LinAlgError,
            "need a symmetric positive definite matrix",
        ),
        (
            lambda: solved(lambda x, t: x.sum() - t, solve=linear_solve.solve_inv()),
            torch.linalg.LinAlgError,
            "needs a matrix that is not singular",
        ),
    ],
)
def test_bad_input(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


@each_row("solve", SOLVES)
def test_a_polynomial_s_root_has_its_jacobian(solve):
    @custom_root(lambda x, t: x * x + x - t, argnums=1, solve=SOLVES[solve])
    def root(x, t):
        return ((1 + 4 * t).sqrt() - 1) / 2

    t = torch.tensor([2.0, 3.0], dtype=torch.float64)
    jacobian = torch.func.jacrev(lambda t: root(torch.ones_like(t), t))(t)
    torch.testing.assert_close(jacobian, (1 + 4 * t).rsqrt().diag())


@each_row("name", ["default", "inv", "gmres", "bicgstab"])
def test_a_complex_solution_of_an_equation_with_conjugates(name):
    def residual(x, a, target):
        z, r = x
        return 3 * z + a * z.conj() + 0.2 * r.sum() - target, 2 * r + z.real.sum() + (a * a.conj()).real.sum()

    def solve(init, a, target):
        z, r = init
        for _ in range(200):
            of_z, of_r = residual((z, r), a, target)
            z, r = z - 0.2 * of_z, r - 0.2 * of_r
        return z, r

    a = (0.5 * torch.complex(double(2), double(2, seed=1))).requires_grad_()
    target = torch.complex(double(2, seed=2), double(2, seed=3)).requires_grad_()
    first = torch.zeros(2, dtype=torch.complex128), torch.zeros(3, dtype=torch.float64)
    implicit = custom_root(residual, (1, 2), solve=SOLVES[name] or linear_solve.solve_normal_cg(rtol=1e-13))
    both = [way(solve) for way in (implicit, custom_root(residual, (1, 2), adjoint="unrolled"))]

    def derivatives(solved):
        z, r = solved(first, a, target)
        outer = z.real.sum() + (z.imag**2).sum() + (r**2).sum()
        grads = torch.autograd.grad(outer, (a, target), create_graph=True)
        slope = sum((grad.real + grad.imag**2).sum() for grad in grads)
        return [z, r, *grads, *torch.autograd.grad(slope, (a, target))]

    torch.testing.assert_close(derivatives(both[0]), derivatives(both[1]), rtol=1e-8, atol=1e-10)
    targets = torch.stack([target, 2 * target])
    z, _ = torch.vmap(both[0], in_dims=(None, None, 0))(first, a, targets)
    one, _ = both[0](first, a, 2 * target)
    torch.testing.assert_close(z[1], one)
    found, expected = (torch.autograd.grad(v.imag.sum(), a)[0] for v in (z[1], one))
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


NAMES = {
    "a variable": "def solve_all(solver):\n    global x\n    for x in xs:\n        yield solver(equation)",
    "an attribute": """
class Task:
    def equation(self, z, w): return z**3 + z - w * self.x
    def solve_all(self, solver):
        for self.x in xs:
            yield solver(self.equation)
solve_all = Task().solve_all
""",
}


@each_row("text", NAMES.values(), ids=NAMES)
@each_row("order", [1, 2])
def test_names_of_an_equation_mean_what_they_meant_in_the_solve(text, order):
    """Where several tasks are solved in a loop, and one backward pass follows."""
    w = torch.tensor([0.7, 1.3], dtype=torch.float64, requires_grad=True)
    names = {"__name__": "__main__", "xs": torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)}
    exec("def equation(z, w): return z**3 + z - w * x\n" + text, names)

    def solver(equation):
        def solved(init, w):
            return nonlinear_solve.newton(rtol=1e-12)(lambda z: equation(z, w), init)

        return custom_root(equation, argnums=1)(solved)(torch.ones_like(w), w)

    def derivative(value):
        (gradient,) = torch.autograd.grad(value.sin().sum(), w, create_graph=order == 2)
        return torch.autograd.grad(gradient.sum(), w)[0] if order == 2 else gradient

    late = [derivative(value) for value in list(names["solve_all"](solver))]
    torch.testing.assert_close(late, [derivative(value) for value in names["solve_all"](solver)])
    if order == 1:  # the derivative of z**3 + z = w x
        for x, found in zip(names["xs"], late, strict=True):
            z = solver(lambda z, w, x=x: z**3 + z - w * x).detach()
            torch.testing.assert_close(found, z.cos() * x / (3 * z**2 + 1))


def test_a_tensor_of_an_equation_that_was_changed_in_place_is_an_error():
    w = torch.tensor([0.7, 1.3], dtype=torch.float64, requires_grad=True)
    x = torch.ones(2, dtype=torch.float64)
    z = custom_root(lambda z, w: z - w * x, argnums=1)(lambda init, w: w * x)(torch.zeros(2), w)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


@each_row("order", [1, 2])
def test_an_equation_that_torch_must_not_differentiate_is_an_error(order):
    """A backward pass differentiates it for its arguments, which torch's own refusal is not behind."""

    def equation(z, w):
        loss = (w * Once.apply(z)).sum() + (z**2).sum() / 2
        return torch.autograd.grad(loss, z, create_graph=True)[0]

    w = torch.tensor([0.7, 1.3], dtype=torch.float64, requires_grad=True)
    z = custom_root(equation, argnums=1)(lambda init, w: init.requires_grad_())(torch.zeros_like(w), w)
    with pytest.raises(RuntimeError, match="twice a function that was marked with @once_differentiable"):
        torch.autograd.grad(z.sum(), w, create_graph=order == 2)


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].cos()
