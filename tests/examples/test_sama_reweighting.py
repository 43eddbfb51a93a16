"""Learned weights beat equal ones where most labels are wrong, and SAMA needs less memory than the exact gradient."""

from __future__ import annotations

import re
from pathlib import Path

from tests.examples.running import run_python

EXAMPLE = Path(__file__).parents[2] / "examples" / "sama_reweighting.py"


def test_learned_weights_beat_equal_ones(tmp_path: Path) -> None:
    picture = tmp_path / "new" / "weights.png"
    output = run_python(
        EXAMPLE, "--noise", 0.6, "--seeds", 1, "--steps", 250, "--meta-lr", 0.05, "--output", picture
    )
    (row,) = re.findall(r"^\| 60% \| (\S+)% \| (\S+)% \| (\S+)% \| (\S+)% \|", output, re.MULTILINE)
    plain, exact, sama, oracle = map(float, row)
    assert plain + 5 < sama < oracle
    assert plain + 5 < exact < oracle
    (row,) = re.findall(r"^\| memory \| (\S+) MiB \| (\S+) MiB \| (\S+) MiB \|", output, re.MULTILINE)
    without, record, difference = map(float, row)
    assert without < difference < 0.6 * record
    assert picture.read_bytes().startswith(b"\x89PNG")
