"""Validation trains again without some examples, and tells how well scores have said what comes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

import torchopt_dist as todist
from tests.attribution.problems import EXAMPLES, QUERIES, Data, training
from tests.rows import each_row
from torchopt_dist.attribution import Validation, attribute, counterfactual, metasmoothness, validate


def gentle(data: Data) -> Any:
    """A training in which losses are nearly linear in the weights."""
    return training(data, optimizer=todist.sgd(lr=0.02))


def test_exact_scores_put_trainings_into_their_order() -> None:
    data = Data()
    of = gentle(data)
    exact = attribute(of, data.queries)
    random = torch.randn(QUERIES, EXAMPLES, generator=torch.Generator().manual_seed(0))
    for left_out in (0.5, 2):
        found = validate(of, data.queries, {"exact": exact, "random": random}, left_out=left_out, retrains=24)
        number = EXAMPLES // 2 if left_out == 0.5 else 2
        assert ((found.subsets == 0).sum(1) == number).all()
        assert found.losses.shape == (24, QUERIES)
        assert found.correlations["exact"].shape == (QUERIES,)
        assert found.means["exact"] > 0.9
        assert abs(found.means["random"]) < 0.5
        assert [line.split()[0] for line in found.table().splitlines()] == ["method", "exact", "random"]
    predicted = found.subsets.double() @ exact.scores.T - exact.scores.sum(1)
    change = found.losses - exact.query_losses
    assert (predicted - change).abs().max() < 0.2 * change.abs().max()
    by_scipy = stats.spearmanr(predicted[:, 0], found.losses[:, 0]).statistic
    assert found.correlations["exact"][0].item() == pytest.approx(by_scipy)


def test_equal_numbers_share_their_ranks() -> None:
    from torchopt_dist.attribution import validation

    one = torch.tensor([[1.0, 3.0], [1.0, 2.0], [0.0, 2.0], [5.0, 2.0], [4.0, 0.0]])
    other = torch.tensor([[2.0, 1.0], [2.0, 1.0], [1.0, 0.0], [2.0, 1.0], [9.0, 1.0]])
    found = validation._correlations(one, other)
    expected = [stats.spearmanr(one[:, n], other[:, n]).statistic for n in range(2)]
    assert found.tolist() == pytest.approx(expected)


def test_a_training_without_what_helps_is_worse() -> None:
    data = Data()
    of = gentle(data)
    exact = attribute(of, data.queries)
    found = counterfactual(of, data.queries, exact, 3)
    assert set(found) == {"exact", "random"}
    assert found["exact"].shape == (QUERIES,)
    assert (found["exact"] > 0).all()
    assert found["exact"].mean() > found["random"].mean()
    weights = of.weights()
    weights[exact.scores[1].argsort()[:3]] = 0
    with torch.no_grad():
        alone = data.queries(of.run(weights, todist.FirstOrder()).params)
    torch.testing.assert_close(found["exact"][1], alone[1] - exact.query_losses[1])


def test_groups_are_left_out_whole() -> None:
    data = Data()
    of = training(data, optimizer=todist.sgd(lr=0.02), groups=data.groups)
    found = validate(of, data.queries, attribute(of, data.queries), left_out=2, retrains=6)
    assert found.subsets.shape == (6, 4)


def test_a_smooth_training_is_told_from_a_rough_one() -> None:
    data = Data()
    assert metasmoothness(gentle(data)) > 0.9
    assert metasmoothness(training(data, optimizer=todist.sgd(lr=3.0))) < metasmoothness(gentle(data))


class Interrupted(Exception):
    """A process that ends."""


def test_a_validation_goes_on_from_its_folder(tmp_path: Path) -> None:
    data, calls = Data(), []
    of = gentle(data)
    exact = attribute(of, data.queries)

    def queries(model: Any) -> Tensor:
        calls.append(1)
        if len(calls) == 7:
            raise Interrupted
        return data.queries(model)

    whole = validate(of, data.queries, exact, retrains=10)
    with pytest.raises(Interrupted):
        validate(of, queries, exact, retrains=10, folder=tmp_path)
    found = validate(of, queries, exact, retrains=10, folder=tmp_path)
    assert torch.equal(found.losses, whole.losses)
    assert len(calls) == 7 + 6  # four of the first six were kept
    again = validate(of, queries, exact, retrains=10, folder=tmp_path)
    assert len(calls) == 13
    assert isinstance(again, Validation)
    for other in ({"seed": 1}, {"left_out": 0.3}, {"retrains": 11}):
        with pytest.raises(ValueError, match="`folder` must be that of this validation"):
            validate(of, queries, exact, **{"retrains": 10, **other}, folder=tmp_path)
    with pytest.raises(ValueError, match="`folder` must be that of this validation"):
        validate(training(data, seed=1), queries, exact, retrains=10, folder=tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(ValueError, match="is torn"):
        validate(of, queries, exact, retrains=10, folder=tmp_path)


@each_row(
    ("options", "error", "text"),
    [
        ({"left_out": 0.0}, ValueError, "at least 1 of the 12 examples"),
        ({"left_out": 12}, ValueError, "and not all, got 12"),
        ({"left_out": 1.5}, ValueError, "got 1.5, which is 18"),
        ({"left_out": "half"}, TypeError, "a part or a number of examples, got str"),
        ({"retrains": 1}, ValueError, "at least 2, got 1"),
        ({"retrains": 2.0}, TypeError, "`retrains` must be an integer"),
        ({"scores": {}}, ValueError, "at least one method"),
        ({"scores": [1]}, TypeError, "got list for 'scores'"),
        ({"scores": torch.ones(5, 3)}, ValueError, r"shape \(queries, 12\), got \(5, 3\)"),
        ({"scores": {"a": torch.ones(5, 12), "b": torch.ones(4, 12)}}, ValueError, "of the same queries"),
    ],
)
def test_what_validate_refuses(options: dict[str, Any], error: type[Exception], text: str) -> None:
    data = Data()
    given = {"scores": torch.ones(QUERIES, EXAMPLES), **options}
    with pytest.raises(error, match=text):
        validate(gentle(data), data.queries, given.pop("scores"), **given)


def test_what_counterfactual_refuses() -> None:
    data = Data()
    for k, error in ((0, ValueError), (12, ValueError), (1.0, TypeError)):
        with pytest.raises(error, match="`k` must be"):
            counterfactual(gentle(data), data.queries, torch.ones(QUERIES, EXAMPLES), k)
