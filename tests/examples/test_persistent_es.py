"""Persistent evolution strategies: right where short unrolls are wrong, and the same on one and two workers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import torchopt_dist as todist
from tests.examples.running import LEARNS, imported, numbers, rows
from tests.processes import torchrun

EXAMPLE = Path(__file__).parents[2] / "examples" / "persistent_es.py"


def gradient(problem: str, adjoint: object, cut: int, pairs: int, at: list[float] | None = None) -> Tensor:
    example = imported(EXAMPLE)
    theta = example.PROBLEMS[problem].theta if at is None else torch.tensor(at)
    theta = theta.clone().requires_grad_()
    torch.manual_seed(0)
    loss = example.mean_loss(example.Run(problem, adjoint, cut, ""), theta, pairs)
    return torch.autograd.grad(loss, theta)[0]


def test_truncation_turns_a_gradient_around_that_persistent_noise_keeps():
    exact = gradient("influence balancing", todist.Recorded(), 100, 1).item()
    for cut in (1, 10):
        assert gradient("influence balancing", todist.Recorded(), cut, 1).item() < -0.1 * exact
    adjoint = todist.PersistentEvolutionStrategies(1, 0.1, unroll=10)
    estimate = gradient("influence balancing", adjoint, 100, 1000).item()
    assert estimate == pytest.approx(exact, rel=0.6)  # some standard errors


def test_only_whole_smoothed_loops_lead_off_the_plateau():
    place = [0.4, -0.3]
    persistent = todist.PersistentEvolutionStrategies(1, 0.3, unroll=10)
    estimate = gradient("toy regression", persistent, 100, 64, place)
    short = gradient("toy regression", todist.EvolutionStrategies(1, 0.3), 10, 64, place)
    assert estimate[0] < -1
    assert short.abs().max() < 0.1


@LEARNS
def test_the_table_of_two_workers_has_the_numbers_of_one(tmp_path, learns):
    short = ("--meta-steps", 2, "--pairs", 2, "--output", tmp_path / "a.png")
    table = rows(torchrun("--standalone", "--nproc_per_node=2", EXAMPLE, *short))
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    example = imported(EXAMPLE)
    assert len(table) == len(example.RUNS)
    rows_and_runs = list(zip(table, example.RUNS, strict=True))
    for row, run in rows_and_runs if learns else rows_and_runs[3::4]:  # in this process
        losses, thetas = example.meta_train(run, 2, 2, 0)
        assert row[1] == f"`{example.shown(run)}`"
        expected = [*losses.tolist(), *thetas.flatten().tolist()]
        assert numbers(row[2:4]) == pytest.approx(expected, abs=0.0051)  # two digits are printed
