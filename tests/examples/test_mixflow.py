"""Every way gives the same gradient; replayed by blocks, memory hardly grows with the steps."""

from __future__ import annotations

import re
from pathlib import Path

from tests.examples.running import run_python

EXAMPLE = Path(__file__).parents[2] / "examples" / "mixflow.py"


def test_replayed_blocks_take_a_fraction_of_a_record(tmp_path: Path) -> None:
    picture = tmp_path / "new" / "memory.png"
    output = run_python(EXAMPLE, "--layers", 1, 2, 3, "--steps", 1, 2, 4, "--output", picture)
    peaks = {
        size: [float(cost) for cost in re.findall(r"(\S+) MiB", rest)]
        for size, rest in re.findall(r"^\| (\d, \d) \|(.*)$", output, re.MULTILINE)
    }
    assert list(peaks) == ["1, 2", "2, 2", "3, 2", "2, 1", "2, 4"]
    record, reverse, forward, blocks = peaks["2, 4"]
    assert max(reverse, forward) < 0.6 * record
    assert blocks < 0.4 * record
    growth = [after - before for before, after in zip(peaks["1, 2"], peaks["3, 2"], strict=True)]
    assert growth[3] < 0.2 * growth[0]  # as the depth grows
    growth = [after - before for before, after in zip(peaks["2, 1"], peaks["2, 4"], strict=True)]
    assert growth[3] < 0.1 * growth[0]  # as the steps do
    assert picture.read_bytes().startswith(b"\x89PNG")
