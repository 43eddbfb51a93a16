"""Two ranks learn the weights that one learns, and each keeps half of the history."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.examples.running import run_python

EXAMPLE = Path(__file__).parents[2] / "examples" / "data_parallel_metagradients.py"
NUMBER = r"-?\d+\.\d+"


def test_two_ranks_learn_what_one_learns_in_less_memory(tmp_path: Path) -> None:
    picture = tmp_path / "new" / "curves.png"
    short = ["--ranks", 1, 2, "--steps", 24, "--meta-steps", 2, "--sequences", 16]
    printed = run_python(EXAMPLE, *short, "--output", picture)
    pattern = rf"(\d) rank\(s\) .* ({NUMBER}) -> ({NUMBER}), .* ones ({NUMBER}), .* others ({NUMBER}), peak ({NUMBER})"
    one, two = ([float(x) for x in found] for found in re.findall(pattern, printed))
    assert one[:1] + two[:1] == [1, 2]
    assert two[1:5] == pytest.approx(one[1:5], abs=2e-6)
    assert one[2] < one[1]
    assert two[5] < 0.8 * one[5]
    assert picture.read_bytes().startswith(b"\x89PNG")
