"""Where the adjoints that estimate run, and what they refuse: their place in a program, whatever they estimate."""

from __future__ import annotations

import dataclasses
import itertools
import math
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torchopt_dist as todist
from tests.diff.adjoint_table import ALL, ESTIMATORS, FINITE, SAMPLED, Regression
from tests.processes import World
from tests.rows import each_row
from torchopt_dist import pytree
from torchopt_dist.distributed.partition import TensorDimensionPartitioner


@each_row("name", FINITE)
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


@each_row("name", FINITE)
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


@each_row("name", [*FINITE, "implicit"])
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


@each_row("name", ESTIMATORS)
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


@each_row("name", ESTIMATORS)
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


@each_row("name", ESTIMATORS)
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


@each_row("name", ["implicit", *SAMPLED])
def test_in_vmap_tasks_whose_parameters_stay_have_gradients_of_their_own(name):
    """No step of the first loop moves the parameters, so they are the same for all tasks."""
    problem = Regression()
    optimizer = todist.transform.multi_steps(todist.sgd(lr=0.1), 3)
    scales = (0.5 + torch.rand(3, dtype=torch.float64)).requires_grad_()

    def task(scale):
        return todist.inner_loop(
            lambda w: problem.loss(w * scale),
            optimizer,
            problem.first,
            2,
            meta=(problem.weights, scale),
            adjoint=ALL[name],
            seed=0,
        ).params

    weights, found = torch.arange(3.0, dtype=torch.float64), []
    for made in (torch.vmap(task), lambda scales: torch.stack([task(scale) for scale in scales])):
        torch.manual_seed(0)
        value = ((made(scales) ** 3).sum(1) * weights).sum()
        found.append(torch.autograd.grad(value, (problem.weights, scales), materialize_grads=True))
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-12)
    assert found[1][1].any() == (name == "implicit")


@each_row("name", FINITE)
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


@each_row("name", [*ESTIMATORS, "replayed from snapshots"])
@pytest.mark.filterwarnings("ignore:.Implicit.* gives no gradient")  # to the rate
def test_steps_are_run_again_under_the_autocast_of_the_loop_which_keeps_the_casts_of_one(name):
    damped = todist.linear_solve.solve_cg(ridge=1.0, rtol=1e-3)
    adjoint = todist.Implicit(damped, not_converged="ignore") if name == "implicit" else ALL[name]
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


@each_row("name", SAMPLED)
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


@each_row(
    ("name", "which"), [*((name, "meta") for name in ESTIMATORS), *((name, "first") for name in SAMPLED)]
)
def test_a_tensor_that_backward_reads_and_that_was_overwritten_is_an_error(name, which):
    """That is the meta tensor, and also the first parameters where the loop is run again from them."""
    first, meta = torch.ones(2, requires_grad=True), torch.full((2,), 3.0, requires_grad=True)
    adapted = todist.inner_loop(
        lambda w: (w - meta).square().sum(),
        todist.sgd(lr=0.25),
        first,
        2,
        meta=meta,
        adjoint=ESTIMATORS[name],
    )
    with torch.no_grad():
        {"meta": meta, "first": first}[which].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        adapted.params.sum().backward()


@each_row("outer", [lambda w: (w**2).sum(), lambda w: w.sum()])
@each_row("name", [*FINITE, *SAMPLED])
def test_a_second_derivative_is_refused(name, outer):
    """Of a linear outer loss, too, whose own gradient is a constant: what is missing must not go unnoticed."""
    problem = Regression()
    adapted = problem.run(ESTIMATORS[name], todist.sgd(lr=0.1), 2).params
    (found,) = torch.autograd.grad(outer(adapted), problem.weights, create_graph=True)
    with pytest.raises(NotImplementedError, match=f"`{type(ESTIMATORS[name]).__name__}` is an estimate"):
        (found.sum() + problem.weights.sum()).backward()


@each_row(
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


class Product(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return a * b

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return grad * b, grad * a


class OldProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return grad * b, grad * a


@torch.library.custom_op("todist_tests::product", mutates_args=())
def op_product(a: Tensor, b: Tensor) -> Tensor:
    return a * b


op_product.register_autograd(
    lambda ctx, grad: (op_product(grad, ctx.saved_tensors[1]), op_product(grad, ctx.saved_tensors[0])),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)

PRODUCTS: dict[str, Any] = {
    "a function": OldProduct.apply,  # as a program keeps it, made before any loop
    "a function with a context": Product.apply,
    "an operator": op_product,
    "a checkpoint": lambda w, m: checkpoint(OldProduct.apply, w, m, use_reentrant=False),
    "func.grad": lambda w, m: torch.func.grad(lambda a, b: (a * b * a).sum() / 2)(w, m),
    "func.vmap": lambda w, m: torch.func.vmap(lambda a, b: a * b)(w, m),
    "func.vjp": lambda w, m: torch.func.vjp(lambda a, b: Product.apply(a, b) * a / 2, w, m)[1](w / w)[0],
}


@each_row(
    "adjoint",
    [
        todist.Implicit(),
        todist.EvolutionStrategies(2, 0.01),
        todist.PersistentEvolutionStrategies(2, 0.01, unroll=2),
        todist.FiniteDifference(),
        todist.Replayed(),
    ],
)
@each_row("way", PRODUCTS)
def test_meta_tensors_are_followed_wherever_a_loss_uses_them(way, adjoint):
    m = torch.tensor([0.5, 0.8, 1.1], dtype=torch.float64, requires_grad=True)
    first = torch.ones(3, dtype=torch.float64, requires_grad=True)

    def found(product: Any) -> list[Tensor]:
        torch.manual_seed(1)  # of the directions
        moved = todist.inner_loop(
            lambda w: ((product(w, m) - 2) ** 2).sum() + (w**4).sum(),
            todist.sgd(lr=0.05),
            first,
            4,
            meta=m,
            adjoint=adjoint,
            seed=0,
        ).params
        of_second_order = isinstance(adjoint, todist.Implicit | todist.Replayed)
        (grad,) = torch.autograd.grad((moved**3).sum(), m, create_graph=of_second_order)
        return [grad, *(torch.autograd.grad(grad.sum(), m) if of_second_order else [])]

    torch.testing.assert_close(found(PRODUCTS[way]), found(torch.mul), rtol=1e-6, atol=1e-8)


@each_row("link", ["lookahead", "schedule_free"])
def test_a_state_that_begins_with_the_first_parameters_gets_their_noise(link):
    w = torch.tensor([1.0, -2.0], dtype=torch.float64, requires_grad=True)
    still = todist.sgd(lr=0.0)
    optimizer = {
        "lookahead": todist.transform.lookahead(still, 1, 0.5),
        "schedule_free": todist.transform.schedule_free(still, 0.9),
    }[link]

    def gradient(optimizer, **options):
        torch.manual_seed(0)
        made = todist.inner_loop(
            lambda p: (p - 0.1 * w).square().sum(), optimizer, w, 3, meta=w,
            adjoint=todist.EvolutionStrategies(samples=2, sigma=0.1), **options,
        )  # fmt: skip
        return torch.autograd.grad(made.params.sum(), w)[0]

    torch.testing.assert_close(gradient(optimizer), gradient(still))  # by both the parameters stay
    given = optimizer.init(w.detach())  # has no noise, and draws the parameters to where it began
    assert (gradient(optimizer, state=given).abs() < 0.8 * gradient(still).abs()).all()
