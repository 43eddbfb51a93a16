"""A compiled inner loop computes what the same loop computes without a compiler: values, gradients, random numbers.

Most tests trace, and take torch's ops in the place of kernels: what is ours is the same, and no C++ compiler is needed.
"""

from __future__ import annotations

import functools
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchopt_dist as todist
from tests.cuda_graphs import emulate_graphs
from tests.diff.adjoint_table import ALL, OPTIMIZERS, Problem, gradients
from torchopt_dist.core import programs

pytestmark = [
    pytest.mark.compiles,
    # torch hides these two by itself, where warnings are not errors
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
]
X = torch.linspace(-1, 1, 4 * 8 * 3, dtype=torch.float64).reshape(4, 8, 3).sin()
Y = torch.linspace(-2, 3, 4 * 8 * 2, dtype=torch.float64).reshape(4, 8, 2).cos()
BATCHES = list(zip(X, Y, strict=True))


MORE = bool(os.environ.get("TODIST_FUZZ_LOOPS"))
"""Whether the table of adjoints and optimizers runs with kernels."""


@pytest.fixture(autouse=True)
def _traced(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """Programs are traced, not made into kernels, and none is there yet; that a program is not made is an error."""
    of_table = "optimizer" in request.node.name
    if not (request.function is test_kernels or (of_table and MORE)):
        monkeypatch.setattr(programs, "kernels", lambda _captured, graph, _inputs: graph)
    programs.programs_of.cache_clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*compile=True")
        yield


def net(*more: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5, bias=False), *more, nn.Tanh(), nn.Linear(5, 2)).double()


def results(
    adjoint: Any,
    module: nn.Module,
    optimizer: Callable[[Tensor], Any],
    loss: Callable[[nn.Module, Any, Tensor], Any],
    batches: Sequence[Any] = BATCHES,
    **options: Any,
) -> list[Tensor]:
    """What a loop makes: parameters, buffers, losses, state, and gradients of all that it was given."""
    weights = torch.linspace(-1, 1, 8, dtype=torch.float64, requires_grad=True)
    lr = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(3)
    made = todist.inner_loop(
        lambda m, batch: loss(m, batch, weights),
        optimizer(lr),
        module,
        batches,
        meta=weights,
        adjoint=adjoint,
        seed=1,
        **options,
    )
    outer = sum((p * p.detach().cos()).sum() for p in made.params.parameters())
    given = [weights, lr, *(p for p in module.parameters() if p.requires_grad)]
    found = torch.autograd.grad(outer, given, allow_unused=True)
    state = [x for x in todist.pytree.flatten(made.state)[0] if isinstance(x, Tensor)]
    grads = [torch.zeros_like(x) if g is None else g for x, g in zip(given, found, strict=True)]
    return [*made.params.parameters(), *made.params.buffers(), made.losses, *state, *grads]


def weighted(module: nn.Module, batch: Any, weights: Tensor) -> Tensor:
    x, y = batch
    return (torch.sigmoid(weights[: len(x)]) * ((module(x) - y) ** 2).mean(1)).mean()


def assert_same(
    adjoint: Any,
    module: nn.Module,
    optimizer: Callable[[Tensor], Any],
    loss: Callable[..., Any] = weighted,
    **options: Any,
) -> None:
    compiled = results(adjoint, module, optimizer, loss, compile=True, **options)
    expected = results(adjoint, module, optimizer, loss, **options)
    assert len(compiled) == len(expected)
    for one, other in zip(compiled, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    "name",
    [
        "replayed",
        pytest.param("truncated", marks=pytest.mark.nightly),
        "SAMA",
        pytest.param("evolution strategies", marks=pytest.mark.nightly),
    ],
)
def test_results_of_cuda_graphs_are_kept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    captured = emulate_graphs(monkeypatch)
    module = net(nn.BatchNorm1d(5).double())
    graphs = results(ALL[name], module, todist.adam, weighted, compile="reduce-overhead")
    assert captured
    expected = results(ALL[name], module, todist.adam, weighted)
    for one, other in zip(graphs, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def found_by(problem: Problem, adjoint: Any, *, compile: bool) -> list[Tensor]:
    """Losses and gradients for everything that the table has them for."""
    torch.manual_seed(3)
    made = problem.run(adjoint, seed=1, compile=compile)
    given = problem.tensors()
    grads = gradients(problem.outer(made.params), given)
    filled = [torch.zeros_like(x) if grads[name] is None else grads[name] for name, x in given.items()]
    return [made.losses, *todist.pytree.flatten(made.state)[0], *filled]


OF_STRATEGIES = ("sgd module", "adam of numbers module", "schedule module", "adamw tree")
"""Loops run again with noise have programs of their own, which are no others for other optimizers."""


@pytest.mark.parametrize(
    ("optimizer", "kind"),
    [
        *(
            pytest.param(name, "module", marks=[] if name == "sgd" else pytest.mark.nightly)
            for name in OPTIMIZERS
        ),
        pytest.param("adamw", "tree", marks=pytest.mark.nightly),
    ],
)
def test_every_adjoint_with_every_optimizer(optimizer: str, kind: str) -> None:
    """One program serves all adjoints of an optimizer; most tests below have Adam's."""
    problem = Problem(kind, optimizer)
    for name, adjoint in {**ALL, "replayed by memory": todist.Replayed(memory="3KiB")}.items():
        if name == "implicit" or ("strategies" in name and f"{optimizer} {kind}" not in OF_STRATEGIES):
            continue
        found = found_by(problem, adjoint, compile=True)
        expected = found_by(problem, adjoint, compile=False)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(
                one, other, rtol=1e-9, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}"
            )


OPTIMIZERS_OF_TREES: dict[str, Callable[[Tensor], Any]] = {
    "muon": lambda lr: todist.transform.partition(
        {"matrix": todist.muon(lr=lr), "other": todist.adamw(lr=lr)},
        lambda tree: {name: "matrix" if leaf.ndim == 2 else "other" for name, leaf in tree.items()},
    ),
    "lamb": lambda lr: todist.lamb(lr=lr),
    "masked": lambda lr: todist.chain(
        todist.transform.add_decayed_weights(0.1, mask=lambda tree: {name: "bias" in name for name in tree}),
        todist.sgd(lr=lr),
    ),
}


@pytest.mark.parametrize("name", ["muon", "masked", pytest.param("lamb", marks=pytest.mark.nightly)])
def test_optimizers_that_need_the_tree(name: str) -> None:
    assert_same(todist.Recorded(), net(), OPTIMIZERS_OF_TREES[name])


def test_meta_tensors_and_rates_may_have_a_history() -> None:
    scale = torch.tensor([0.5, 2.0], dtype=torch.float64, requires_grad=True)
    xs = torch.tensor([[1.0, 2.0], [2.0, 3.0], [0.5, 0.6]], dtype=torch.float64, requires_grad=True)
    w = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)

    def run(adjoint: Any, compile: bool) -> tuple[Tensor, ...]:
        weights = scale.exp()
        made = todist.inner_loop(
            lambda w, x: (weights * x * w**4).sum(),
            todist.adam(lr=scale.sum() / 100),
            2 * w,
            lambda step: xs[step].sin(),
            steps=3,
            meta=(weights, xs),
            adjoint=adjoint,
            compile=compile,
        )
        return torch.autograd.grad(made.params.sum(), (scale, xs, w), materialize_grads=True)

    for adjoint in (todist.Recorded(), todist.Replayed(), todist.Truncated(2)):
        torch.testing.assert_close(run(adjoint, True), run(adjoint, False))


def test_autocast_is_that_of_the_loop() -> None:
    module = net().float()

    def loss(module: nn.Module, batch: Any, weights: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            made = module(batch[0].float())
        return (made.float() - batch[1].float()).square().mean() + weights.sum().float() * 0

    def run(compile: bool) -> list[Tensor]:
        return results(todist.Replayed(), module, lambda lr: todist.sgd(lr=lr), loss, compile=compile)

    for one, other in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3)


def test_four_threads_at_once() -> None:
    modules = [net() for _ in range(4)]
    expected = results(todist.Replayed(), net(), lambda lr: todist.adam(lr=lr), weighted)

    def run(module: nn.Module) -> list[Tensor]:
        return results(todist.Replayed(), module, lambda lr: todist.adam(lr=lr), weighted, compile=True)

    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(run, modules):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def test_implicit_gradients() -> None:
    weights = torch.tensor([0.5, 2.0], dtype=torch.float64, requires_grad=True)
    first = torch.zeros(2, dtype=torch.float64, requires_grad=True)

    def run(compile: bool) -> Any:
        made = todist.inner_loop(
            lambda w: ((w - 1) ** 2 * weights.exp()).sum() + w.sum() ** 2,
            todist.sgd(lr=0.05),
            first,
            200,
            meta=weights,
            adjoint=todist.Implicit(),
            compile=compile,
        )
        return made.params, torch.autograd.grad(made.params.square().sum(), weights)[0]

    torch.testing.assert_close(run(True), run(False), rtol=1e-9, atol=1e-11)


def test_a_pair_of_loops_goes_to_another_process_and_is_compiled_there() -> None:
    """As with ``parallel=``: what a worker gets is a pickle, and it has no program yet."""
    problem, sent = Problem("module", "sgd"), []

    def elsewhere(pairs: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def run(seeds: Tensor) -> Tensor:
            sent.append(cloudpickle.dumps(pairs))
            programs.programs_of.cache_clear()
            made: Tensor = cloudpickle.loads(sent[-1])(seeds)
            assert programs.programs_of.cache_info().currsize > 0
            return made

        return run

    adjoint = todist.EvolutionStrategies(samples=2, sigma=0.1)
    there = todist.EvolutionStrategies(samples=2, sigma=0.1, parallel=elsewhere)
    found = found_by(problem, there, compile=True)
    assert len(sent) == 1
    for one, other in zip(found, found_by(problem, adjoint, compile=False), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    "adjoint",
    [todist.Recorded(), todist.Replayed(), pytest.param(todist.Truncated(2), marks=pytest.mark.nightly)],
    ids=repr,
)
def test_batches_may_draw_random_numbers_and_have_a_history(adjoint: Any) -> None:
    scale = torch.tensor([0.5, 2.0], dtype=torch.float64, requires_grad=True)
    w = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)

    def run(compile: bool) -> tuple[Tensor, ...]:
        made = todist.inner_loop(
            lambda w, x: (x * w**2).sum() + (torch.rand(2, dtype=torch.float64) * w).sum(),
            todist.adam(lr=0.1),
            w,
            lambda step: (scale * (1 + step)).sin() + torch.rand(2, dtype=torch.float64),
            steps=3,
            meta=scale,
            seed=5,
            adjoint=adjoint,
            compile=compile,
        )
        return made.losses, *torch.autograd.grad(made.params.sum(), (scale,))

    torch.testing.assert_close(run(True), run(False))


def test_tensors_of_batches_that_depend_on_each_other() -> None:
    x = torch.tensor([0.5, 2.0], dtype=torch.float64, requires_grad=True)
    w = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)

    def run(compile: bool) -> tuple[Tensor, ...]:
        y = x.exp()
        made = todist.inner_loop(
            lambda w, batch: (y * batch * w**2).sum(),
            todist.adam(lr=0.1),
            w,
            [x, y, x],
            meta=(x, y),
            adjoint=todist.Replayed(),
            compile=compile,
        )
        return made.losses, *torch.autograd.grad(made.params.sum(), (x, w))

    torch.testing.assert_close(run(True), run(False))


def test_a_normalized_module_with_buffers() -> None:
    assert_same(todist.Replayed(), net(nn.BatchNorm1d(5), nn.LayerNorm(5)), lambda lr: todist.adam(lr=lr))


@pytest.mark.parametrize("adjoint", [todist.Recorded(), todist.Replayed()], ids=repr)
def test_weight_norm_is_differentiated_by_its_formula(adjoint: Any) -> None:
    """Torch takes the norms for constants."""
    module = net()
    nn.utils.parametrizations.weight_norm(module[0])
    assert_same(adjoint, module, lambda lr: todist.sgd(lr=lr))


SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda x, y: torch.add(x, y, alpha=0.1),
    "add by names": lambda x, y: torch.add(other=y, alpha=0.1, input=x),
    "add by a method": lambda x, y: x.add(y, alpha=0.1),
    "add in place": lambda x, y: x.clone().add_(y, alpha=0.1),
    "subtract": lambda x, y: torch.subtract(x, y, alpha=0.1),
    "subtract in place": lambda x, y: x.clone().sub_(other=y, alpha=0.1),
    "subtract a number": lambda x, _: torch.sub(x, 2, alpha=3),
}


def test_the_factor_of_a_sum_is_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's compiler loses it where one of both is a product of matrices."""
    graphs: list[Any] = []

    def seen(_captured: bool, graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    monkeypatch.setattr(programs, "kernels", seen)
    x = X[0, :3]
    w = (2 * x).requires_grad_()
    masked = OPTIMIZERS_OF_TREES["masked"](torch.tensor(0.1))
    for name, sum_of in SUMS.items():
        made = []
        for compile in (False, True):

            def loss(w: Tensor, x: Tensor, sum_of: Any = sum_of) -> Tensor:
                return sum_of(w @ x, x).cos().sum()

            result = todist.inner_loop(loss, todist.sgd(lr=0.1), w, [x, x], compile=compile)
            made.append([result.losses, result.params])
        torch.testing.assert_close(made[1], made[0], msg=lambda text, name=name: f"{name}: {text}")

    def step(w: Tensor, grad: Tensor) -> Any:
        params, grads = {"weight": w, "bias": w[0]}, {"weight": grad, "bias": grad[0]}
        return masked.update(grads, masked.init(params), params=params, inplace=False)[0]["bias"]

    torch.compile(step, backend=functools.partial(seen, False), fullgraph=True)(w.detach(), x)
    assert len(graphs) > len(SUMS)
    for graph in graphs:
        assert not [node for node in graph.graph.nodes if "alpha" in node.kwargs]


def test_frozen_and_unused_parameters_stay_as_they_are() -> None:
    module = net()
    module.register_parameter("unused", nn.Parameter(torch.ones(3, dtype=torch.float64)))
    module[2].weight.requires_grad_(False)
    assert_same(todist.Replayed(), module, lambda lr: todist.adamw(lr=lr, weight_decay=0.1))


def test_batches_of_two_sizes() -> None:
    batches = [(x[: 8 - 3 * (i % 2)], y[: 8 - 3 * (i % 2)]) for i, (x, y) in enumerate(BATCHES)]
    assert_same(todist.Replayed(), net(nn.Dropout(0.3)), lambda lr: todist.adam(lr=lr), batches=batches)


def test_a_loss_with_other_values() -> None:
    def loss(module: nn.Module, batch: Any, weights: Tensor) -> tuple[Tensor, Any]:
        value = weighted(module, batch, weights)
        return value, {"twice": 2 * value, "name": "x"}

    assert_same(todist.Replayed(), net(), lambda lr: todist.adam(lr=lr), loss, has_aux=True)


def test_the_initial_parameters_may_be_meta_too() -> None:
    module = net()
    first = [p.detach().clone().requires_grad_() for p in module.parameters()]

    def run(compile: bool) -> tuple[Tensor, ...]:
        made = todist.inner_loop(
            lambda tree, batch: sum(
                ((a - b) ** 2).sum() + ((a - batch) ** 3).mean() for a, b in zip(tree, first, strict=True)
            ),
            todist.adam(lr=0.1),
            first,
            torch.arange(3.0, dtype=torch.float64),
            meta=first,
            adjoint=todist.Replayed(),
            compile=compile,
        )
        return torch.autograd.grad(sum((x**2).sum() for x in made.params), first)

    for one, other in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(one, other)


def test_tied_leaves_of_a_tree() -> None:
    w = torch.tensor([1.0, -2.0], requires_grad=True)
    v = torch.tensor([0.5], requires_grad=True)

    def run(compile: bool) -> tuple[Tensor, ...]:
        made = todist.inner_loop(
            lambda t: (t["a"] * t["b"]).sum() ** 2 + t["c"].sum() ** 2,
            todist.adam(lr=0.1),
            {"a": w, "b": w, "c": v},
            3,
            adjoint=todist.Replayed(),
            compile=compile,
        )
        assert made.params["a"] is made.params["b"] or torch.equal(made.params["a"], made.params["b"])
        return torch.autograd.grad(made.params["a"].sum() + made.params["c"].sum(), (w, v))

    for one, other in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(one, other)


def test_a_number_that_the_loss_closes_over_is_never_stale() -> None:
    w = torch.tensor([1.0, 2.0], requires_grad=True)
    for factor in (1.0, 3.0, 1.0):

        def loss(w: Tensor, factor: float = factor) -> Tensor:
            return factor * w.sum()

        made = todist.inner_loop(loss, todist.sgd(lr=0.1), w, 1, compile=True)
        torch.testing.assert_close(made.params, w - 0.1 * factor)


@pytest.mark.parametrize("name", ["replayed", "finite difference"])
def test_a_name_that_is_bound_anew_before_the_backward_pass(name: str) -> None:
    """By then a program would find what the name means now."""

    def gradient(compile: bool) -> Tensor:
        weights = torch.linspace(-1, 1, 8, dtype=torch.float64, requires_grad=True)
        total = torch.zeros((), dtype=torch.float64)
        scale, y = 0.0, Y[0]

        def loss(m: nn.Module, x: Tensor) -> Tensor:
            return ((weights.sigmoid() * scale).unsqueeze(1) * (m(x) - y) ** 2).mean()

        for number in range(2):
            scale, y = 1.0 + number, Y[number]
            given = {"meta": weights, "adjoint": ALL[name], "compile": compile}
            made = todist.inner_loop(loss, todist.sgd(lr=0.1), net(), list(X[:2]), **given)
            total = total + made.params(X[2]).square().mean()
        return torch.autograd.grad(total, weights)[0]

    torch.testing.assert_close(gradient(True), gradient(False))


def test_a_name_of_a_schedule_that_is_bound_anew_before_the_backward_pass() -> None:
    def gradient(compile: bool) -> Tensor:
        w = torch.tensor([1.0, 2.0], requires_grad=True)
        rate = 0.1
        made = todist.inner_loop(
            lambda w: (w**4).sum(),
            todist.sgd(lr=lambda step: rate * 0.9**step),
            w,
            2,
            adjoint=todist.Replayed(),
            compile=compile,
        )
        rate = 0.01
        return torch.autograd.grad(made.params.sum(), w)[0]

    torch.testing.assert_close(gradient(True), gradient(False))


def test_the_same_tensor_twice_and_then_two() -> None:
    w = torch.tensor([1.0, 2.0], requires_grad=True)
    a, b = torch.tensor([1.0, 3.0]), torch.tensor([5.0, 7.0])

    def loss(w: Tensor, batch: Any) -> Tensor:
        return (w * batch[0] * batch[1]).sum()

    made = todist.inner_loop(loss, todist.sgd(lr=0.1), w, [(a, a), (a, b)], compile=True)
    torch.testing.assert_close(made.params, w - 0.1 * (a * a + a * b))


def test_training_goes_on_with_the_state() -> None:
    module = net()
    whole = todist.inner_loop(
        lambda m, b: weighted(m, b, torch.ones(8, dtype=torch.float64)), todist.adam(), module, BATCHES
    )
    with torch.no_grad():
        part: Any = todist.inner_loop(
            lambda m, b: weighted(m, b, torch.ones(8, dtype=torch.float64)),
            todist.adam(),
            module,
            BATCHES[:2],
            compile=True,
        )
        part = todist.inner_loop(
            lambda m, b: weighted(m, b, torch.ones(8, dtype=torch.float64)),
            todist.adam(),
            part.params,
            BATCHES[2:],
            state=part.state,
            compile=True,
        )
    for one, other in zip(part.params.parameters(), whole.params.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_a_second_backward_pass() -> None:
    lr = torch.tensor(0.1, requires_grad=True)
    w = torch.tensor([1.0, 2.0], requires_grad=True)
    made = todist.inner_loop(lambda w: (w**4).sum(), todist.sgd(lr=lr), w, 2, compile=True)
    first = torch.autograd.grad(made.params.sum(), (w, lr), retain_graph=True)
    again = torch.autograd.grad(made.params.sum(), (w, lr))
    torch.testing.assert_close(first, again)


def test_second_derivatives_of_a_replay() -> None:
    w = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)

    def second(compile: bool) -> Tensor:
        made = todist.inner_loop(
            lambda w: (w**4).sum(), todist.sgd(lr=0.01), w, 2, adjoint=todist.Replayed(), compile=compile
        )
        (first,) = torch.autograd.grad(made.params.sum(), w, create_graph=True)
        return torch.autograd.grad(first.sum(), w)[0]

    expected = second(False)
    torch.testing.assert_close(second(True), expected)


def test_what_the_compiler_refuses_runs_as_it_is() -> None:
    def loss(w: Tensor) -> Tensor:
        return w.sum() ** 2 if w.sum() > 1 else w.sum()

    w = torch.tensor([1.0, 2.0], requires_grad=True)
    expected = todist.inner_loop(loss, todist.sgd(lr=0.1), w, 3)
    for adjoint in (todist.Recorded(), todist.Replayed(), todist.FirstOrder()):
        programs.programs_of.cache_clear()
        with pytest.warns(
            UserWarning, match="runs as without it, since the compiler refuses it: .*[Bb]ranch"
        ) as told:
            made = todist.inner_loop(loss, todist.sgd(lr=0.1), w, 3, adjoint=adjoint, compile=True)
        assert told[0].filename == __file__
        torch.testing.assert_close(made.params, expected.params)
        torch.testing.assert_close(made.losses, expected.losses)


def test_the_log_says_that_a_loop_is_compiled_and_for_how_long(caplog: pytest.LogCaptureFixture) -> None:
    w = torch.tensor([1.0, 2.0], requires_grad=True)
    with caplog.at_level("INFO", logger="torchopt_dist"):
        todist.inner_loop(lambda w: (w**2).sum(), todist.sgd(lr=0.25), w, 2, compile=True)
    said = [record.getMessage() for record in caplog.records if record.name == "torchopt_dist"]
    assert said[0] == "compiling an inner loop, which takes some 5 to 45 s at its first call"
    assert re.fullmatch(r"compiled an inner loop in \d+\.\d s", said[1])


def test_without_a_cpp_compiler_the_loop_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(_captured: bool, _graph: Any, _inputs: Any) -> Any:
        raise RuntimeError("No working C++ compiler found")

    monkeypatch.setattr(programs, "kernels", no_compiler)
    w = torch.tensor([1.0, 2.0], requires_grad=True)
    with pytest.warns(
        UserWarning, match=r"No working C\+\+ compiler found \(install one, .*`apt install g\+\+`"
    ):
        made = todist.inner_loop(lambda w: (w**2).sum(), todist.sgd(lr=0.25), w, 2, compile=True)
    torch.testing.assert_close(made.params, w / 4)


def test_in_vmap_the_loop_runs_as_it_is() -> None:
    def adapted(w: Tensor) -> Any:
        return todist.inner_loop(lambda w: (w**2).sum(), todist.sgd(lr=0.25), w, 2, compile=True).params

    w = torch.tensor([1.0, 2.0], requires_grad=True)
    with pytest.warns(UserWarning, match="torch.func's transforms"):
        torch.testing.assert_close(torch.func.vmap(adapted)(w), w / 4)


def test_errors_of_the_loss_are_the_loops_own() -> None:
    w = torch.tensor([1.0, 2.0], requires_grad=True)
    other = torch.tensor(1.0, requires_grad=True)
    with pytest.raises(ValueError, match="`compile` must be True, False or"):
        todist.inner_loop(lambda w: w.sum(), todist.sgd(lr=0.1), w, 2, compile="yes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one element, got shape"):
        todist.inner_loop(lambda w: w, todist.sgd(lr=0.1), w, 2, compile=True)
    with pytest.raises(ValueError, match="meta"):
        todist.inner_loop(
            lambda w: (w * other).sum(), todist.sgd(lr=0.1), w, 2, adjoint=todist.Replayed(), compile=True
        )
    blocks = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(ValueError, match="`compile` must be False with `blocks`"):
        todist.inner_loop(
            lambda m, x: m(x).sum(),
            todist.sgd(lr=0.1),
            blocks,
            [torch.ones(2)],
            adjoint=todist.Replayed(blocks="auto"),
            compile=True,
        )


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("layers", "optimizer"),
    [
        pytest.param([nn.Dropout(0.3), nn.GELU()], lambda lr: todist.adam(lr=lr), id="dropout"),
        pytest.param([], lambda lr: todist.sgd(lr=lr, weight_decay=0.1), id="sgd"),
        *(pytest.param([], of_tree, id=name) for name, of_tree in OPTIMIZERS_OF_TREES.items()),
    ],
)
def test_kernels(layers: list[nn.Module], optimizer: Callable[[Tensor], Any]) -> None:
    """With torch's own compiler, dropout and all."""
    assert_same(todist.Replayed(), net(*layers), optimizer)


def test_a_meta_optimizer_takes_the_word() -> None:
    module = net()
    optimizer = todist.MetaAdam(module, lr=0.1)
    made = optimizer.run(lambda m, b: F.mse_loss(m(b[0]), b[1]), BATCHES, compile=True)
    other = net()
    expected = todist.MetaAdam(other, lr=0.1).run(lambda m, b: F.mse_loss(m(b[0]), b[1]), BATCHES)
    torch.testing.assert_close(made.losses, expected.losses)
