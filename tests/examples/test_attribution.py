"""In a small setting, exact scores put trainings into their order better than products of gradients do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.running import LEARNS, numbers, rows, run_python
from tests.processes import torchrun
from torchopt_dist.attribution import Attribution

EXAMPLE = Path(__file__).parents[2] / "examples" / "attribution.py"
SHORT = ["--examples", 64, "--wrong", 4, "--queries", 3, "--epochs", 2, "--retrains", 2, "--accumulate", 2]
WHOLE = ["--examples", 96, "--wrong", 10, "--queries", 6, "--epochs", 16, "--retrains", 16, "--accumulate", 2]


@LEARNS
def test_exact_scores_are_better_than_products_alone_and_on_two_workers(tmp_path: Path, learns: bool) -> None:
    sizes = WHOLE if learns else SHORT
    printed = run_python(EXAMPLE, *sizes, "--output", tmp_path / "new" / "scores.png")
    exact, checkpoint, checkpoints, random = rows(printed)
    assert [row[0] for row in (exact, checkpoint, checkpoints, random)] == [
        "exact",
        "checkpoint",
        "checkpoints",
        "random",
    ]
    for place in (1, 2) if learns else ():
        assert float(exact[place]) > 0.85
        assert float(exact[place]) > max(float(checkpoint[place]), float(checkpoints[place])) + 0.05
        assert abs(float(random[place])) < 0.4
    if learns:
        assert float(exact[3]) > float(random[3])
    assert (tmp_path / "new" / "scores.png").read_bytes().startswith(b"\x89PNG")
    saved = Attribution.load(tmp_path / "new" / "scores.safetensors")
    assert saved.scores.shape == ((6, 96) if learns else (3, 64))
    words = map(str, ["--standalone", "--nproc_per_node=2", EXAMPLE, *sizes])
    again = torchrun(*words, "--output", tmp_path / "pair.png")
    assert "2 worker(s)" in again
    for one, other in zip(rows(again), rows(printed), strict=True):
        assert numbers(one) == pytest.approx(numbers(other), abs=0.05)
