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


def test_it_becomes_better_than_tuned_adam(tmp_path):
    short = ("--meta-steps", 16, "--steps", 30, "--networks", 4, "--test-networks", 4)
    printed = run_python(EXAMPLE, *short, "--output", tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    for row in rows(printed)[:2]:
        tuned, _, learned, *_ = numbers(row[1:3])
        assert learned < tuned


def test_meta_training_is_the_same_on_one_and_two_workers(tmp_path):
    short = (
        "--meta-steps",
        2,
        "--steps",
        10,
        "--networks",
        2,
        "--test-networks",
        2,
        "--output",
        tmp_path / "a.png",
    )
    one = run_python(EXAMPLE, *short)
    two = torchrun("--standalone", "--nproc_per_node=2", EXAMPLE, *short)
    losses = [[float(loss) for loss in re.findall(r"mean loss (\S+)", text)] for text in (one, two)]
    assert len(losses[0]) == 2
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    for row, other in zip(rows(one), rows(two), strict=True):
        assert numbers(row[1:3]) == pytest.approx(numbers(other[1:3]), abs=0.01)
