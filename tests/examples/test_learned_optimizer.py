"""A learned optimizer begins as Adam, and meta-training makes it better than tuned Adam."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import torchopt_dist as todist
from tests.examples.running import imported, numbers, rows, run_python
from tests.processes import torchrun

EXAMPLE = Path(__file__).parents[2] / "examples" / "learned_optimizer.py"


def test_it_begins_as_adam():
    example = imported(EXAMPLE)
    losses = []
    for optimizer in (
        example.learned_optimizer(example.adam(0.05), 20),
        todist.adam(lr=0.05, betas=(0.9, 0.99)),
    ):
        torch.manual_seed(1)
        with torch.no_grad():
            losses.append(example.trainings(optimizer, (16,), (2, 20), held_out=True))
    assert torch.allclose(*losses, rtol=1e-3)


@pytest.mark.nightly
def test_it_becomes_better_than_tuned_adam(tmp_path):
    short = ("--meta-steps", 12, "--steps", 20, "--networks", 4, "--test-networks", 4)
    printed = run_python(EXAMPLE, *short, "--output", tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    tuned, _, learned = zip(*[numbers(row[1:3]) for row in rows(printed)[:3]], strict=True)
    assert sum(learned) < 0.98 * sum(tuned)


def test_the_meta_loss_of_two_workers_is_that_of_one(tmp_path):
    short = ("--meta-steps", 1, "--steps", 10, "--networks", 2, "--test-networks", 2)
    command = ("--standalone", "--nproc_per_node=2", EXAMPLE, *short, "--output", tmp_path / "a.png")
    (printed,) = re.findall(r"mean loss (\S+)", torchrun(*command))
    example = imported(EXAMPLE)
    torch.manual_seed(0)
    theta = example.adam(rate=0.03)
    alone = torch.stack([example.meta_loss(seed, theta, (2, 10)) for seed in range(2)]).mean()
    assert float(printed) == pytest.approx(alone.item(), abs=1e-3)
