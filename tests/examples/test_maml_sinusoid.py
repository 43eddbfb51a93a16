"""MAML on sines: it fits new ones sooner than pre-training, on one worker and on two."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tests.examples.running import imported, run_python, table
from tests.processes import torchrun

EXAMPLE = Path(__file__).parents[2] / "examples" / "maml_sinusoid.py"


def errors(printed: str) -> dict[tuple[str, str], list[float]]:
    """Learner, number of known points → errors."""
    rows = table(printed)[1:]
    return {(row[0], row[1]): [float(cell.split()[0]) for cell in row[3:] if cell] for row in rows}


@pytest.mark.nightly
def test_maml_fits_new_sines_sooner(tmp_path: Path) -> None:
    sizes = ("--meta-steps", 120, "--lr", 0.01, "--inner-lr", 0.02, "--tasks", 10, "--test-tasks", 60)
    found = errors(run_python(EXAMPLE, *sizes, "--output", tmp_path / "one.png"))
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")
    maml, ordinary = found["MAML", "10"], found["pre-training", "10"]
    assert maml[1] < maml[0] - 0.3
    assert maml[1] < ordinary[1] - 0.4
    assert found["oracle", ""][0] < ordinary[0]


def test_one_worker_and_two_learn_alike(tmp_path: Path) -> None:
    words = (
        EXAMPLE,
        "--meta-steps",
        6,
        "--tasks",
        5,
        "--test-tasks",
        7,
        "--output",
        tmp_path / "picture.png",
    )
    one, two = errors(run_python(*words)), errors(torchrun("--standalone", "--nproc_per_node=2", *words))
    assert len(one) == 5
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    for key, of_one in one.items():
        assert two[key] == pytest.approx(of_one, abs=0.02)


def test_an_oracle_sees_height_and_phase() -> None:
    example = imported(EXAMPLE)
    plain, told = (example.sines(3, torch.Generator().manual_seed(0), oracle) for oracle in (False, True))
    x, height, phase = told.x.unbind(-1)
    assert torch.equal(x, plain.x[..., 0])
    torch.testing.assert_close(height * torch.sin(x - phase), plain.y[..., 0])
    assert 0.1 < height.min() <= height.max() < 5
    assert 0 < phase.min() <= phase.max() < math.pi
