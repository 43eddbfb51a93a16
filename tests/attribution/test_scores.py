"""Scores are what trainings with other weights say, and what closed forms and products by hand say."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchopt_dist as todist
from tests.attribution import problems
from tests.attribution.problems import DOUBLE, EXAMPLES, QUERIES, TOKENS, Data, network, training
from tests.rows import each_row
from torchopt_dist.attribution import Training, attribute


def losses_with(of: Training, data: Data, weights: Tensor) -> Tensor:
    """Of the queries, after a training that is written here step by step."""
    model = copy.deepcopy(of.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3)
    for index in of.batches:
        each = of.loss(model, index)
        own = weights[index if of.groups is None else of.groups[index]]
        if of.mask is None:
            loss = (own * each).sum() / len(index)
        else:
            own = own if own.ndim == 2 else own[:, None]
            loss = (own * each * of.mask[index]).sum() / of.mask[index].sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return data.queries(model).detach()


def differences(of: Training, data: Data, weights: Tensor, step: float = 1e-5) -> Tensor:
    """How the losses of queries change with each weight: two trainings a weight."""
    found = []
    for way in step * torch.eye(weights.numel(), **DOUBLE):
        ends = [losses_with(of, data, weights + sign * way.view_as(weights)) for sign in (1, -1)]
        found.append((ends[0] - ends[1]) / (2 * step))
    return torch.stack(found, 1).reshape(QUERIES, *weights.shape)


KINDS: dict[str, tuple[dict[str, Any], bool, tuple[int, ...]]] = {
    "examples": ({}, False, (EXAMPLES,)),
    "masked": ({"mask": Data().mask}, False, (EXAMPLES,)),
    "tokens": ({"mask": Data().mask}, True, (EXAMPLES, TOKENS)),
    "groups": ({"groups": Data().groups}, False, (4,)),
    "masked groups": ({"mask": Data().mask, "groups": Data().groups}, False, (4,)),
}


@each_row("accumulate", [1, 3])
@each_row("kind", KINDS)
def test_exact_scores_are_differences_of_trainings(kind: str, accumulate: int) -> None:
    options, tokens, shape = KINDS[kind]
    data = Data()
    of = training(data, accumulate=accumulate, **options)
    found = attribute(of, data.queries, tokens=tokens)
    assert found.scores.shape == (QUERIES, *shape)
    ones = torch.ones(shape, **DOUBLE)
    torch.testing.assert_close(found.scores, differences(of, data, ones), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(found.query_losses, losses_with(of, data, ones), rtol=1e-10, atol=0)
    if tokens:
        assert not found.scores[:, ~data.mask].any()
        whole = attribute(of, data.queries)
        torch.testing.assert_close(found.per_example, whole.scores, rtol=1e-10, atol=1e-12)


@each_row(
    "adjoint",
    [todist.Recorded(), todist.Replayed(snapshots=2), todist.Truncated(6), todist.Replayed(blocks="auto")],
)
@each_row("together", [1, 2, 8])
def test_every_exact_adjoint_and_number_of_queries_together_give_the_same(
    adjoint: Any, together: int
) -> None:
    data = Data()
    expected = attribute(training(data), data.queries).scores
    found = attribute(training(data), data.queries, adjoint=adjoint, together=together).scores
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-13)


def test_random_layers_and_a_tied_weight() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(4, 4, **DOUBLE), nn.Linear(4, 4, **DOUBLE)
            self.second.weight = self.first.weight
            self.drop, self.last = nn.Dropout(0.3), nn.Linear(4, 1, **DOUBLE)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.last(self.drop(self.second(self.first(x).tanh()).tanh()))
            return out

    data = Data()

    def queries(model: Any) -> Tensor:
        return data.queries(model.eval())

    of = training(data, model=Tied(), optimizer=todist.adamw(lr=0.05, eps_root=1e-3), seed=4)
    scores = attribute(of, queries, together=2).scores

    def trained(weights: Tensor) -> Tensor:
        with torch.no_grad():
            return queries(of.run(weights, todist.FirstOrder()).params)

    way = torch.randn(EXAMPLES, generator=torch.Generator().manual_seed(0), **DOUBLE)
    ends = [trained(1 + sign * 1e-5 * way) for sign in (1, -1)]
    torch.testing.assert_close(scores @ way, (ends[0] - ends[1]) / 2e-5, rtol=1e-6, atol=1e-9)


def test_after_one_step_of_sgd_scores_are_products_in_closed_form() -> None:
    data, model = Data(), network()
    index = torch.tensor([3, 0, 7])
    of = training(data, optimizer=todist.sgd(lr=0.2), batches=[index])
    found = attribute(of, data.queries)
    params = list(model.parameters())
    each = [torch.autograd.grad(loss, params, retain_graph=True) for loss in data.of_examples(model, index)]
    with torch.no_grad():
        for p, *grads in zip(params, *each, strict=True):
            p -= 0.2 * sum(grads) / 3
    asked = [torch.autograd.grad(loss, params, retain_graph=True) for loss in data.queries(model)]
    expected = torch.zeros(QUERIES, 8, **DOUBLE)
    for row, of_query in enumerate(asked):
        for grads, place in zip(each, index.tolist(), strict=True):
            expected[row, place] = -0.2 / 3 * sum((a * b).sum() for a, b in zip(of_query, grads, strict=True))
    torch.testing.assert_close(found.scores, expected, rtol=1e-10, atol=1e-13)
    assert found.names == tuple(map(str, range(8)))


def products(model: nn.Module, data: Data, loss: Any, mask: Tensor | None = None) -> Tensor:
    params = list(model.parameters())

    def flat(value: Tensor) -> Tensor:
        return torch.cat([g.flatten() for g in torch.autograd.grad(value, params, retain_graph=True)])

    of_queries = torch.stack([flat(value) for value in data.queries(model)])
    own = loss(model, torch.arange(EXAMPLES))
    of_examples = own if mask is None else (own * mask).sum(1)
    return -of_queries @ torch.stack([flat(value) for value in of_examples]).T


@each_row("accumulate", [1, 2])
@each_row("masked", [False, True])
def test_products_of_gradients_are_those_by_hand(masked: bool, accumulate: int) -> None:
    data = Data()
    of = training(data, accumulate=accumulate, **({"mask": data.mask} if masked else {}))
    model = copy.deepcopy(of.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3)
    mask, kept = (data.mask if masked else None), []
    for index in of.batches:
        kept.append(copy.deepcopy(model))
        each = of.loss(model, index)
        loss = each.mean() if mask is None else (each * mask[index]).sum() / mask[index].sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    kept.append(model)
    by_hand = [products(one, data, of.loss, mask) for one in kept]
    one = attribute(of, data.queries, method="checkpoint", together=3)
    assert one.method == "checkpoint"
    torch.testing.assert_close(one.scores, by_hand[6], rtol=1e-9, atol=1e-12)
    some = attribute(of, data.queries, method="checkpoints", checkpoints=3).scores
    torch.testing.assert_close(some, by_hand[2] + by_hand[4] + by_hand[6], rtol=1e-9, atol=1e-12)
    every = attribute(of, data.queries, method="checkpoints", checkpoints=1).scores
    torch.testing.assert_close(every, one.scores, rtol=1e-12, atol=0)


def test_the_training_is_left_as_it_was() -> None:
    data = Data()
    of = training(data)
    before = copy.deepcopy(of.model.state_dict())
    state = torch.get_rng_state()
    for method in ("exact", "checkpoint", "checkpoints"):
        with torch.no_grad():  # a score is a gradient all the same
            attribute(of, data.queries, method=method)
    assert all(torch.equal(before[name], value) for name, value in of.model.state_dict().items())
    assert all(p.grad is None for p in of.model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_workers_find_what_one_process_finds() -> None:
    alone = problems.on_workers()
    spread = todist.launch(problems.rank_zero_on_workers, nproc_per_host=2, rpc=True).rank(0)
    for name, value in alone.items():
        torch.testing.assert_close(spread[name], value, rtol=1e-9, atol=1e-11)


def test_ranks_that_train_together_find_what_one_process_finds() -> None:
    alone = problems.on_ranks()
    alone["parted"] = alone["examples, exact"]
    found = todist.launch(problems.together, nproc_per_host=2, backend="gloo")
    for rank in (0, 1):
        assert found.rank(rank).keys() == alone.keys()
        for name, value in alone.items():
            torch.testing.assert_close(found.rank(rank)[name], value, rtol=1e-9, atol=1e-11)
    parts = todist.launch(problems.sizes, nproc_per_host=2, backend="gloo")
    assert [parts.rank(0), parts.rank(1)] == [{3}, {2}]  # of five
    text = todist.launch(problems.too_small, nproc_per_host=2, backend="gloo").rank(1)
    assert "an example for each of the 2 ranks, got one of 1" in text


def ask(**options: Any) -> Any:
    data = Data()
    given = {"training": training(data), "queries": data.queries, **options}
    return attribute(given.pop("training"), given.pop("queries"), **given)


@each_row(
    ("options", "error", "text"),
    [
        ({"training": (1, 2)}, TypeError, r"a todist.attribution.Training, got tuple: Training\("),
        ({"queries": 3}, TypeError, "a function from the trained model to losses, got int"),
        ({"queries": lambda model: 1.0}, ValueError, "a loss for each query, a vector, got float"),
        ({"queries": lambda model: torch.ones(2, 2)}, ValueError, r"a vector, got shape \(2, 2\)"),
        ({"method": "influence"}, ValueError, "'exact', 'checkpoint', 'checkpoints', got 'influence'"),
        ({"adjoint": "replayed"}, TypeError, "must be an adjoint"),
        ({"together": 0}, ValueError, "`together` must be at least 1, got 0"),
        ({"checkpoints": 1.5}, TypeError, "`checkpoints` must be an integer"),
        ({"tokens": True}, ValueError, "`tokens` must be False without a `mask`"),
        ({"query_names": ["a"]}, ValueError, "must have 5 names, one a query, got 1"),
        ({"metod": "exact"}, TypeError, "did you mean `method`"),
    ],
)
def test_what_attribute_refuses(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        ask(**options)


@each_row(
    ("options", "error", "text"),
    [
        ({"model": 3}, TypeError, "must be a torch.nn.Module, got int"),
        ({"loss": 3}, TypeError, "`loss` must be a function"),
        ({"batches": []}, ValueError, "a batch for each step, got none"),
        ({"parallel": 2}, TypeError, "must be a todist.DataParallel, got int"),
        ({"batches": [[1, 2]]}, ValueError, "got list .* for step 0"),
        ({"batches": [torch.ones(2)]}, ValueError, "got Tensor .*float32"),
        ({"batches": [torch.tensor([-1])]}, ValueError, "from 0 to"),
        ({"names": ["a"]}, ValueError, "from 0 to 0, got up to 11"),
        ({"names": ["a"], "groups": torch.zeros(12, dtype=torch.int64) + 1}, ValueError, "must have 2 names"),
        ({"mask": torch.ones(3)}, ValueError, r"`mask` must be a tensor of 2 dimension\(s\), got shape"),
        (
            {"mask": torch.ones(12, 3), "groups": torch.zeros(13, dtype=torch.int64)},
            ValueError,
            "of the same examples, got 12 and 13",
        ),
    ],
)
def test_what_a_training_refuses(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        training(Data(), **options)


def test_a_loss_of_another_shape_is_an_error() -> None:
    data = Data()
    with pytest.raises(ValueError, match=r"a number for each example, .* got shape \(\)"):
        ask(training=training(data, loss=lambda model, index: data.of_examples(model, index).mean()))
    with pytest.raises(ValueError, match=r"`mask` must have the shape of the losses of tokens, \(5, 3\)"):
        ask(training=training(data, mask=torch.ones(EXAMPLES, 2, dtype=torch.bool)))
