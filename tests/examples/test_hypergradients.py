"""The measured rates of three hypergradients are those of the theorems."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.examples.running import imported, numbers, rows
from tests.processes import torchrun

EXAMPLE = Path(__file__).parents[2] / "examples" / "hypergradients.py"


def test_the_rates_of_two_workers_are_those_of_the_theorems_and_of_one_worker(tmp_path):
    short = ("--problems", 2, "--iterations", 40, "--output", tmp_path / "a.png")
    printed = rows(torchrun("--standalone", "--nproc_per_node=2", EXAMPLE, *short))
    table = {row[0]: numbers(row[2:]) for row in printed}
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    for name in ("ITD", "AID-FP", "AID-CG", "AID-FP, trained"):
        measured, _, theory, _ = table[name]
        assert measured == pytest.approx(theory, abs=0.03)
    measured, _, bound, _ = table["AID-CG, trained"]
    assert measured < bound < table["AID-CG"][2] - 0.1
    last = [table[name][3] for name in ("ITD", "AID-FP", "AID-CG", "AID-CG, trained")]
    assert last == sorted(last, reverse=True)
    example = imported(EXAMPLE)
    here = [example.errors(seed, [20])[0] for seed in range(2)]
    for name, values in table.items():
        mean = torch.cat([errors[name] for errors in here]).log().mean().exp().item()
        assert values[3] == pytest.approx(mean, rel=0.1)  # two digits are printed


def test_the_exact_gradient_is_that_of_the_minimum():
    example = imported(EXAMPLE)
    given = example.problem(0)
    exact, _ = given.exact()
    shift = torch.zeros(example.FEATURES, dtype=torch.float64)
    shift[3] = 1e-4

    def outer(log_penalties: torch.Tensor) -> float:
        penalties = log_penalties.detach().exp()
        w = torch.zeros(example.FEATURES, dtype=torch.float64)
        for _ in range(20):
            p = (given.x @ w).sigmoid()
            hessian = given.x.mT * (p * (1 - p)) @ given.x / example.EXAMPLES + penalties.diag()
            gradient = given.x.mT @ (p - given.y) / example.EXAMPLES + penalties * w
            w = w - torch.linalg.solve(hessian, gradient)
        logits = given.validation_x @ w
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, given.validation_y)
        return float(loss)

    slope = (outer(given.log_penalties + shift) - outer(given.log_penalties - shift)) / 2e-4
    assert exact[3].item() == pytest.approx(slope, rel=1e-5)
