"""In a small setting, a choice by exact scores in rounds is better than one at random, and than the scores at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.running import LEARNS, numbers, rows, run_python
from tests.processes import torchrun

EXAMPLE = Path(__file__).parents[2] / "examples" / "select_data.py"
SHORT = ["--examples", 200, "--rounds", 2, "--epochs", 1, "--steps", 10, "--seeds", 2]
WHOLE = ["--examples", 400, "--rounds", 5, "--epochs", 2, "--steps", 100, "--seeds", 2]


@LEARNS
def test_rounds_choose_better_than_chance_alone_and_on_two_workers(tmp_path: Path, learns: bool) -> None:
    sizes = WHOLE if learns else SHORT
    printed = run_python(EXAMPLE, *sizes, "--output", tmp_path / "new" / "kept.png")
    accuracy = {row[0]: numbers(row[3:])[0] for row in rows(printed)}
    wrong = {row[0]: numbers(row[2:3])[0] for row in rows(printed)}
    others = ("at random", "exact scores, at once", "smallest losses", "largest losses")
    assert accuracy.keys() >= {"exact scores, in rounds", *others}
    if learns:
        assert all(accuracy["exact scores, in rounds"] > accuracy[name] + 3 for name in others)
        assert wrong["exact scores, in rounds"] < wrong["at random"] - 5
    assert wrong["at random, right labels only"] == 0
    assert (tmp_path / "new" / "kept.png").read_bytes().startswith(b"\x89PNG")
    words = map(str, ["--standalone", "--nproc_per_node=2", EXAMPLE, *sizes])
    again = torchrun(*words, "--output", tmp_path / "pair.png")
    assert "2 worker(s)" in again
    for one, other in zip(rows(again), rows(printed), strict=True):
        assert numbers(one[3:])[:1] == pytest.approx(numbers(other[3:])[:1], abs=8)
