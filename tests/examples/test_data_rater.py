"""In a small setting, a rater learns to leave out what teaches nothing, alike on one worker and on two."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.running import LEARNS, numbers, run_python, table
from tests.processes import torchrun

EXAMPLE = Path(__file__).parents[2] / "examples" / "data_rater.py"
SHORT = ["--windows", 3, "--gpts", 2, "--steps", 2, "--life", 2, "--test-steps", 2]
WHOLE = ["--windows", 12, "--gpts", 2, "--steps", 3, "--life", 6, "--test-steps", 40]


def found(printed: str) -> dict[str, float]:
    return {
        name: numbers([number])[0]
        for name, number in table(printed)
        if numbers([number]) and "steps" not in number
    }


@LEARNS
def test_the_rater_learns_alone_and_on_two_workers(tmp_path: Path, learns: bool) -> None:
    sizes = WHOLE if learns else SHORT
    printed = run_python(EXAMPLE, *sizes, "--output", tmp_path / "new" / "rated.png")
    of = found(printed)
    assert of.keys() == {"clean", "typos", "shuffled", "base64", "clean alone", "rated", "all the same"}
    if learns:
        assert of["base64"] < 0.5 < of["clean"]
        assert of["clean alone"] < of["rated"] < of["all the same"]
    assert (tmp_path / "new" / "rated.png").read_bytes().startswith(b"\x89PNG")
    words = map(str, ["--standalone", "--nproc_per_node=2", EXAMPLE, *sizes])
    again = torchrun(*words, "--output", tmp_path / "pair.png")
    assert "2 worker(s)" in again
    assert found(again) == pytest.approx(of, abs=0.1)
