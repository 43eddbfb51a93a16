"""Two ranks learn the weights of sources that one learns, which tell clean ones from others, in less memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.examples.running import run_python

EXAMPLE = Path(__file__).parents[2] / "examples" / "data_parallel_metagradients.py"
NUMBER = r"-?\d+\.\d+"


def on_one_and_two_ranks(picture: Path, steps: int, meta_steps: int) -> list[list[float]]:
    """The numbers that are printed for each of both."""
    words = ["--ranks", 1, 2, "--steps", steps, "--meta-steps", meta_steps]
    printed = run_python(EXAMPLE, *words, "--output", picture)
    weights = ", ".join(rf"{name} ({NUMBER})" for name in ("clean", "typos", "shuffled", "random"))
    pattern = rf"(\d) rank\(s\) .* ({NUMBER}) -> ({NUMBER}) .*, weights: {weights}, peak ({NUMBER})"
    one, two = ([float(x) for x in found] for found in re.findall(pattern, printed))
    assert one[:1] + two[:1] == [1, 2]
    assert two[1:7] == pytest.approx(one[1:7], abs=2e-6)
    return [one, two]


def test_two_meta_steps_are_alike_on_one_and_two_ranks(tmp_path: Path) -> None:
    on_one_and_two_ranks(tmp_path / "curves.png", steps=4, meta_steps=2)


@pytest.mark.nightly
def test_two_ranks_learn_what_one_learns_in_less_memory(tmp_path: Path) -> None:
    picture = tmp_path / "new" / "curves.png"
    one, two = on_one_and_two_ranks(picture, steps=60, meta_steps=3)
    assert one[2] < one[1] - 0.3
    clean, typos, shuffled, random = one[3:7]
    assert clean > 5 * max(shuffled, random)
    assert clean >= typos > max(shuffled, random)
    assert two[7] < 0.8 * one[7]
    assert picture.read_bytes().startswith(b"\x89PNG")
