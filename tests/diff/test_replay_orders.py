"""Derivatives of a replay of orders 1 to 3 are those of recorded steps, for each optimizer and grain of replaying."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import torchopt_dist as todist
from tests.diff.adjoint_table import OPTIMIZERS, Problem

GRAINS: dict[str, tuple[int, Any]] = {
    "a step, in segments of segments": (0, lambda net: todist.Replayed(snapshots=1)),
    "several steps": (1 << 24, lambda net: todist.Replayed()),
    "a block": (0, lambda net: todist.Replayed(blocks=net, snapshots=2)),
}
"""Bytes of steps that are recorded together, and the adjoint."""


def derivatives(problem: Problem, adjoint: Any) -> list[tuple[Tensor, ...]]:
    """Of three orders, each of a product with that before it."""
    value = problem.outer(problem.run(adjoint).params)
    ins, draw = list(problem.tensors().values()), torch.Generator().manual_seed(0)
    found = []
    for order in (1, 2, 3):
        grads = torch.autograd.grad(
            value, ins, create_graph=order < 3, materialize_grads=True, allow_unused=True
        )
        found.append(tuple(grad.detach() for grad in grads))
        size = 1 + max(grad.abs().max() for grad in found[-1])
        factors = [torch.randn(grad.shape, dtype=grad.dtype, generator=draw) / size for grad in grads]
        value = torch.stack(
            [(grad * factor).sum() for grad, factor in zip(grads, factors, strict=True)]
        ).sum()
    return found


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_derivatives_of_orders_1_to_3_are_those_of_recorded_steps(optimizer, monkeypatch):
    problem = Problem("module", optimizer)
    del problem.xs[3:]
    expected = derivatives(problem, todist.Recorded())
    assert all(any(grad.any() for grad in grads) for grads in expected)
    for grain, (small, make) in GRAINS.items():
        monkeypatch.setattr("torchopt_dist.diff.adjoints._store.SMALL", small)
        found = derivatives(problem, make(problem.net))
        for order, (ones, others) in enumerate(zip(found, expected, strict=True), 1):
            scale = max(x.abs().max().item() for x in others)
            for x, y in zip(ones, others, strict=True):
                assert torch.allclose(x, y, rtol=1e-9, atol=1e-9 * scale), (
                    grain,
                    order,
                    (x - y).abs().max(),
                    scale,
                )
