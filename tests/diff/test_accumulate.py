"""A step in micro-batches is the step of the whole batch: its value, and its derivatives of order 1 and 2."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torchopt_dist as todist
from tests.diff.adjoint_table import ADJOINTS, ESTIMATORS, Problem
from tests.rows import each_row

DOUBLE: Any = {"dtype": torch.float64}
ROWS = {name: row.adjoint for name, row in ADJOINTS.items()} | ESTIMATORS
ROWS |= {
    "implicit": todist.Implicit(
        todist.linear_solve.solve_cg(ridge=10.0, maxiter=200), not_converged="ignore"
    ),
    "reptile": todist.Reptile(),
    "replayed within memory": todist.Replayed(memory=3000),
    "replayed from the CPU": todist.Replayed(store="cpu", snapshots=3),
    "replayed and checked": todist.Replayed(check=True),
    "replayed in blocks": todist.Replayed(blocks="auto"),
}
ONCE = {"first order", "reptile", "finite difference", "SAMA"} | {
    name for name in ROWS if "evolution" in name
}
"""Those without second derivatives."""


class Numbered(Problem):
    """Batches that say which examples they have, of which each has a weight."""

    def loss(self, params: Any, batch: Any) -> Tensor:
        """The mean over the examples of a part."""
        x, index = batch
        run = params if isinstance(params, nn.Module) else lambda x: self.called(params, x)
        return (self.weights[index] * (self.head(run(x)) - x.sum(1, keepdim=True)).squeeze(1) ** 2).mean()

    def called(self, params: Any, x: Tensor) -> Tensor:
        """What the network makes with such parameters."""
        made: Tensor = torch.func.functional_call(self.net, params, (x,))
        return made

    def run(self, adjoint: Any, **options: Any) -> todist.typing.InnerLoopResult:
        torch.manual_seed(0)
        batches = [(x, torch.arange(5)) for x in self.xs]
        meta = {"weights": self.weights, "head": self.head}
        given = {"meta": meta, "state": self.state, "adjoint": adjoint, "seed": 3, **options}
        return todist.inner_loop(self.loss, self.optimizer, self.params, batches, **given)

    def derivatives(self, adjoint: Any, *, twice: bool, **options: Any) -> list[Tensor | None]:
        """Losses, gradients, and, if asked for, the gradients of these."""
        made, wanted = self.run(adjoint, **options), list(self.tensors().values())
        outer = self.outer(made.params) + (made.losses.sum() if made.losses.requires_grad else 0)
        found = torch.autograd.grad(outer, wanted, allow_unused=True, create_graph=twice)
        if not twice:
            return [made.losses, *found]
        squares = sum((grad**2).sum() for grad in found if grad is not None)
        again = torch.autograd.grad(squares, wanted, allow_unused=True)
        return [made.losses, *found, *again]


def close(found: list[Tensor | None], expected: list[Tensor | None]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


KINDS = [
    (name, kind) for name in ROWS for kind in ("module", "tree") if kind == "module" or "blocks" not in name
]
"""A tree has no blocks."""


@pytest.mark.filterwarnings("ignore:`Implicit:UserWarning", "ignore:todist.Replayed:UserWarning")
@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_micro_batches_are_the_whole_batch(name: str, kind: str, count: int) -> None:
    problem = Numbered(kind, "clipped adam")
    adjoint = todist.Replayed(blocks=problem.net) if "blocks" in name else ROWS[name]
    twice = name not in ONCE
    whole = problem.derivatives(adjoint, twice=twice)
    close(problem.derivatives(adjoint, twice=twice, accumulate=count), whole)


def example(*middle: nn.Module) -> tuple[nn.Module, Tensor, list[Any]]:
    """A network, weights, and batches of examples and their numbers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4, **DOUBLE), *middle, nn.Tanh(), nn.Linear(4, 1, **DOUBLE))
    weights = torch.rand(7, **DOUBLE).requires_grad_()
    return model, weights, [(torch.randn(7, 3, **DOUBLE), torch.arange(7)) for _ in range(3)]


def weighted(weights: Tensor) -> Callable[[Any, Any], Tensor]:
    """The mean over a part's examples."""

    def loss(model: Any, batch: Any) -> Tensor:
        return (weights[batch[1]] * (model(batch[0]) - batch[0].sum(1, keepdim=True)).squeeze(1) ** 2).mean()

    return loss


def outer(model: nn.Module) -> Tensor:
    return sum(((p**3).sum() for p in model.parameters()), torch.zeros(()))


def twice(value: Tensor, weights: Tensor) -> list[Tensor]:
    (first,) = torch.autograd.grad(value, weights, create_graph=True)
    return [value, first, *torch.autograd.grad((first**2).sum(), weights, retain_graph=True)]


EXACT = {"recorded": todist.Recorded(), "replayed": todist.Replayed(), "truncated": todist.Truncated(3)}
exact = each_row("adjoint", EXACT.values(), ids=[*EXACT])


@exact
@each_row("count", [1, 3])
def test_a_pair_of_sum_and_count_is_a_mean_over_all_that_counts(adjoint: Any, count: int) -> None:
    model, weights, batches = example()
    mask = torch.tensor([1, 0, 1, 1, 0, 0, 1], **DOUBLE)

    def pair(model: Any, batch: Any) -> Any:
        each = weights[batch[1]] * (model(batch[0]) ** 2).squeeze(1)
        return (each * mask[batch[1]]).sum(), (weights * mask)[batch[1]].sum()

    def whole(model: Any, batch: Any) -> Tensor:
        total, number = pair(model, batch)
        return total / number

    run = {"optimizer": todist.adam(lr=0.1, eps=1e-3), "params": model, "batches": batches, "meta": weights}
    one = todist.inner_loop(whole, **run, adjoint=adjoint)
    other = todist.inner_loop(pair, **run, adjoint=adjoint, accumulate=count)
    close([*twice(outer(other.params), weights)], [*twice(outer(one.params), weights)])
    torch.testing.assert_close(other.losses, one.losses, rtol=1e-12, atol=0)


def test_aux_is_a_list_of_what_the_parts_return_and_is_connected() -> None:
    model, weights, batches = example()
    loss = weighted(weights)
    made = todist.inner_loop(
        lambda m, b: (loss(m, b), {"loss": loss(m, b), "of": len(b[1]), "which": b[1]}),
        todist.sgd(lr=0.1),
        model,
        batches,
        meta=weights,
        has_aux=True,
        accumulate=3,
    )
    assert [[part["of"] for part in step] for step in made.aux] == [[3, 2, 2]] * 3
    assert torch.cat([part["which"] for part in made.aux[0]]).tolist() == [*range(7)]
    last = sum(part["loss"] * part["of"] / 7 for part in made.aux[-1])
    close(twice(last, weights), twice(made.losses[-1], weights))


@exact
def test_each_part_has_random_numbers_of_its_own_the_same_forwards_and_backwards(adjoint: Any) -> None:
    model, weights, batches = example(nn.Dropout(0.5), nn.BatchNorm1d(4, **DOUBLE))
    drawn: list[Tensor] = []

    def loss(model: Any, batch: Any) -> Tensor:
        drawn.append(torch.rand(3))
        return weighted(weights)(model, batch)

    def value(weights_now: Tensor | None = None) -> float:
        with torch.no_grad():
            before = weights.clone()
            weights.copy_(before if weights_now is None else weights_now)
            made = todist.inner_loop(loss, todist.sgd(lr=0.1), model, batches, seed=5, accumulate=2)
            weights.copy_(before)
            assert int(made.params[2].num_batches_tracked) == 6  # each part in turn
            return outer(made.params).item()

    before = torch.get_rng_state()
    made = todist.inner_loop(
        loss, todist.sgd(lr=0.1), model, batches, meta=weights, seed=5, accumulate=2, adjoint=adjoint
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert len({tuple(one.tolist()) for one in drawn}) == 6
    (grad,) = torch.autograd.grad(outer(made.params), weights)
    assert len({tuple(one.tolist()) for one in drawn}) == 6
    assert not any(buffer.requires_grad for buffer in made.params.buffers())
    step = 1e-5 * torch.eye(7, **DOUBLE)
    ends = [[value(weights.detach() + sign * row) for row in step] for sign in (1, -1)]
    differences = (torch.tensor(ends[0], **DOUBLE) - torch.tensor(ends[1], **DOUBLE)) / 2e-5
    torch.testing.assert_close(grad, differences, rtol=1e-6, atol=1e-8)


@exact
@each_row("count", [2, 4])
def test_the_graph_of_one_part_is_there_at_a_time(adjoint: Any, count: int) -> None:
    model, weights, batches = example()
    made: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def loss(model: Any, batch: Any) -> Tensor:
        alive.append(sum(one() is not None for one in made))
        hidden = model[0](batch[0])
        made.append(weakref.ref(hidden))
        return weighted(weights)(lambda _: model[2](hidden.tanh() * hidden), batch)

    found = todist.inner_loop(
        loss, todist.sgd(lr=0.1), model, batches, meta=weights, accumulate=count, adjoint=adjoint
    )
    values = twice(outer(found.params), weights)
    assert max(alive) == 0
    assert len(alive) > 6 * count
    whole = todist.inner_loop(loss, todist.sgd(lr=0.1), model, batches)
    close([*values], [*twice(outer(whole.params), weights)])


FEEDS: dict[str, Callable[[Tensor, list[Any]], Any]] = {
    "a list": lambda weights, batches: batches,
    "a generator": lambda weights, batches: (batch for batch in batches),
    "a function": lambda weights, batches: batches.__getitem__,
    "a function that draws": lambda weights, batches: (
        lambda n: (torch.randn(7, 3, **DOUBLE), torch.arange(7))
    ),
    "a function of meta": lambda weights, batches: (
        lambda n: (weights[:, None] * batches[n][0], batches[n][1])
    ),
    "one tensor": lambda weights, batches: torch.stack([batch[0] for batch in batches]),
    "dictionaries": lambda weights, batches: [
        {"x": x, "of": {"index": index.numpy()}, "scale": 0.5} for x, index in batches
    ],
}


@each_row("name", FEEDS)
def test_batches_of_every_kind_are_split(name: str) -> None:
    model, weights, batches = example()

    def loss(model: Any, batch: Any) -> Tensor:
        if isinstance(batch, Tensor):
            return weights.sum() * (model(batch) ** 2).mean()
        if isinstance(batch, dict):
            assert isinstance(batch["of"]["index"], np.ndarray)
            batch = batch["scale"] * batch["x"], torch.from_numpy(batch["of"]["index"])
        return weighted(weights)(model, batch)

    def run(**options: Any) -> list[Tensor]:
        made = todist.inner_loop(
            loss,
            todist.sgd(lr=0.1),
            model,
            FEEDS[name](weights, batches),
            steps=3,
            seed=1,
            meta=weights,
            **options,
        )
        return twice(outer(made.params), weights)

    close([*run(accumulate=3)], [*run()])
    if name != "a generator":
        close([*run(accumulate=3, adjoint=todist.Replayed())], [*run()])


@each_row("adjoint", [todist.Recorded(), todist.Replayed()], ids=["recorded", "replayed"])
def test_inside_of_transforms(adjoint: Any) -> None:
    model, weights, batches = example()
    tree = dict(model.named_parameters())

    def of(weights: Tensor, x: Tensor, count: int | None) -> Tensor:
        def loss(params: Any, batch: Any) -> Tensor:
            return weighted(weights)(lambda x: torch.func.functional_call(model, params, (x,)), batch)

        made = todist.inner_loop(
            loss,
            todist.sgd(lr=0.1),
            tree,
            [(x, batches[0][1])] * 2,
            meta=weights,
            adjoint=adjoint,
            accumulate=count,
        )
        return sum(((p**3).sum() for p in made.params.values()), torch.zeros(()))

    xs = torch.randn(4, 7, 3, **DOUBLE)
    found, expected = (
        twice(torch.vmap(lambda x, count=count: of(weights, x, count))(xs).sum(), weights)
        for count in (3, None)
    )
    close([*found], [*expected])
    with torch.no_grad():
        torch.testing.assert_close(of(weights, xs[0], 3), of(weights, xs[0], None), rtol=1e-12, atol=0)
    if isinstance(adjoint, todist.Recorded):
        derivative = torch.func.jvp(
            lambda w: of(w, xs[0], 3), (weights.detach(),), (torch.ones_like(weights),)
        )
        whole = torch.func.jvp(lambda w: of(w, xs[0], None), (weights.detach(),), (torch.ones_like(weights),))
        close([*derivative], [*whole])


@each_row("within", [todist.Recorded(), todist.Replayed()], ids=["recorded", "replayed"])
@each_row("around", [todist.Recorded(), todist.Replayed()], ids=["recorded", "replayed"])
def test_inside_of_another_loop(within: Any, around: Any) -> None:
    model, weights, batches = example()
    rate = torch.tensor(0.1, **DOUBLE, requires_grad=True)

    def inner(rate: Tensor, count: int | None) -> Tensor:
        loss = weighted(weights)
        made = todist.inner_loop(
            lambda model, batch: (1 + rate) * loss(model, batch),
            todist.sgd(lr=0.1),
            model,
            batches,
            meta=(weights, rate),
            adjoint=within,
            accumulate=count,
        )
        return outer(made.params)

    ends = [
        todist.inner_loop(
            lambda rate, count=count: inner(rate, count),
            todist.sgd(lr=1e-3),
            rate,
            2,
            meta=(weights, model),
            adjoint=around,
        ).params
        for count in (2, None)
    ]
    close(*[list(torch.autograd.grad(end, (weights, rate))) for end in ends])


def test_meta_tensors_that_depend_on_each_other() -> None:
    model, weights, batches = example()
    double = 2 * weights

    def run(**options: Any) -> list[Tensor]:
        made = todist.inner_loop(
            lambda m, b: weighted(weights)(m, b) + weighted(double)(m, b),
            todist.sgd(lr=0.1),
            model,
            batches,
            meta=(weights, double),
            **options,
        )
        return twice(outer(made.params), weights)

    for adjoint in (todist.Recorded(), todist.Replayed()):
        close([*run(accumulate=3, adjoint=adjoint)], [*run()])


def test_meta_optimizers_run_takes_it() -> None:
    ends = []
    for count in (None, 3):
        model, weights, batches = example()
        optimizer = todist.MetaAdam(model, lr=0.1, eps=1e-3)
        made = optimizer.run(weighted(weights), batches, meta=weights, accumulate=count)
        assert made.params is model
        ends.append(twice(outer(model), weights))
    close(*ends)


def refused(**options: Any) -> Any:
    model, weights, batches = example()
    given: dict[str, Any] = {"meta": weights, "accumulate": 2, "loss": weighted(weights), "batches": batches}
    given |= options
    return todist.inner_loop(given.pop("loss"), todist.sgd(lr=0.1), model, given.pop("batches"), **given)


@each_row(
    ("options", "error", "text"),
    [
        ({"accumulate": 0}, ValueError, "at least 1 micro-batch, got 0"),
        ({"accumulate": 2.0}, TypeError, "got float"),
        ({"accumulate": True}, TypeError, "got bool"),
        ({"batches": 3, "loss": lambda model: None}, ValueError, "a number of steps, 3: give a batch"),
        ({"compile": True}, ValueError, "`compile` must be False with `accumulate`"),
        ({"batches": [(1, "a")] * 2}, ValueError, "without a tensor that has a dimension of examples"),
        ({"batches": [(torch.ones(2), torch.ones(3))]}, ValueError, r"batch\[0\] has 2, batch\[1\] has 3"),
        ({"batches": [torch.ones(0, 3)]}, ValueError, "must be with batches that have examples"),
        ({"meta": None}, ValueError, "`meta` must list every tensor"),
        ({"loss": lambda m, b: (m(b[0]).sum(), 1, 2)}, TypeError, "a pair .*got a tuple of 3"),
        ({"loss": lambda m, b: (m(b[0]).sum(), "a")}, TypeError, r"\(Tensor, str\).*has_aux=True"),
        ({"loss": lambda m, b: (m(b[0]).sum(), True)}, TypeError, r"\(Tensor, bool\)"),
        ({"loss": lambda m, b: m(b[0]).sum().item()}, TypeError, r"a pair \(sum, count\), got float"),
        ({"loss": lambda m, b: m(b[0])}, ValueError, "one element, got shape"),
        ({"loss": lambda m, b: m(b[0]).sum(), "has_aux": True}, TypeError, r"a pair \(loss, aux\)"),
        ({"loss": lambda m: None}, TypeError, "must take the parameters and a batch"),
        (
            {"loss": lambda m, b: (m(b[0]).sum(), m(b[0]).exp().sum())},
            ValueError,
            "a count that does not depend on the parameters",
        ),
        (
            {"loss": lambda m, b: (m(b[0]).sum(), 1) if 0 in b[1] else m(b[0]).sum()},
            ValueError,
            "for each part of a batch with `accumulate`, or for none",
        ),
    ],
)
def test_what_is_refused(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        refused(**options)


def test_a_loss_that_is_another_one_in_the_backward_pass_is_an_error() -> None:
    model, weights, batches = example()
    calls = iter(range(100))

    def loss(model: Any, batch: Any) -> Tensor:
        return weighted(weights)(model, batch) * (1 + next(calls))

    made = todist.inner_loop(loss, todist.sgd(lr=1e-3), model, batches, meta=weights, accumulate=2)
    with pytest.raises(RuntimeError, match="the same whenever a part of a batch is computed again"):
        outer(made.params).backward()


def test_state_in_attributes_is_refused_with_every_adjoint() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.calls = nn.Linear(3, 1, **DOUBLE), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            out: Tensor = self.layer(x) * self.calls
            return out

    _, weights, batches = example()
    with pytest.raises(ValueError, match="attributes with `accumulate`, which runs steps again"):
        todist.inner_loop(
            weighted(weights), todist.sgd(lr=1e-3), Counting(), batches, meta=weights, accumulate=2
        )
