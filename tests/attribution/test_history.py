"""Scores from a history: other queries, later, without training again."""

from __future__ import annotations

import torch

import torchopt_dist as todist
from torchopt_dist.attribution import Training

D = torch.float64


def made(calls: list[int]) -> Training:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(12, 3, dtype=D, generator=generator), torch.arange(12, dtype=D) / 12
    model = torch.nn.Linear(3, 1).double()
    with torch.no_grad():
        model.weight.fill_(0.1)
        model.bias.zero_()

    def loss(model: torch.nn.Module, index: torch.Tensor) -> torch.Tensor:
        calls.append(len(index))
        return (model(x[index]).squeeze(1).tanh() - y[index]) ** 2

    return Training(
        loss, todist.adamw(lr=0.05, eps_root=1e-6), model, torch.arange(12).split(4) * 3, accumulate=2
    )


def test_later_queries_are_answered_from_the_history(tmp_path) -> None:
    asked = torch.eye(3, dtype=D)
    adjoint = todist.Replayed(store=tmp_path, keep=True)
    counts = []
    for row in (slice(0, 2), slice(2, 3), slice(0, 3)):

        def queries(model: torch.nn.Module, row: slice = row) -> torch.Tensor:
            return model(asked[row]).squeeze(1) ** 2

        calls: list[int] = []
        found = todist.attribute(made(calls), queries, adjoint=adjoint)
        expected = todist.attribute(made([]), queries, adjoint=todist.Recorded())
        torch.testing.assert_close(found.scores, expected.scores)
        counts.append(len(calls))
    assert counts[1] < counts[0], "the training was not run again"
    assert not list(tmp_path.glob("way-back-*"))
