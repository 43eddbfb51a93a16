"""MAML on sines: it fits new ones sooner than pre-training, on one worker and on two."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tests.examples.running import imported, run_python, table
from tests.processes import torchrun

EXAMPLE = Path(__file__).parents[2] / "examples" / "maml_sinusoid.py"


def test_maml_fits_new_sines_sooner_alike_on_one_and_two_workers(tmp_path: Path) -> None:
    rates = ("--lr", 0.01, "--inner-lr", 0.02)
    words = (EXAMPLE, "--meta-steps", 120, *rates, "--tasks", 10, "--test-tasks", 60, "--output")
    one = table(run_python(*words, tmp_path / "one.png"))
    two = table(torchrun("--standalone", "--nproc_per_node=2", *words, tmp_path / "two.png"))
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")
    errors = [
        {(row[0], row[1]): [float(cell.split()[0]) for cell in row[3:] if cell] for row in rows[1:]}
        for rows in (one, two)
    ]
    for key, of_one in errors[0].items():
        assert errors[1][key] == pytest.approx(of_one, abs=0.02)
    maml, ordinary = errors[0]["MAML", "10"], errors[0]["pre-training", "10"]
    assert maml[1] < maml[0] - 0.3
    assert maml[1] < ordinary[1] - 0.4
    assert errors[0]["oracle", ""][0] < ordinary[0]


def test_an_oracle_sees_height_and_phase() -> None:
    example = imported(EXAMPLE)
    plain, told = (example.sines(3, torch.Generator().manual_seed(0), oracle) for oracle in (False, True))
    x, height, phase = told.x.unbind(-1)
    assert torch.equal(x, plain.x[..., 0])
    torch.testing.assert_close(height * torch.sin(x - phase), plain.y[..., 0])
    assert 0.1 < height.min() <= height.max() < 5
    assert 0 < phase.min() <= phase.max() < math.pi
