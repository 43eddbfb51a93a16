"""Every way gives the same gradient, on two workers as on one; by blocks, memory hardly grows with the steps."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.examples.running import LEARNS, imported
from tests.processes import torchrun

EXAMPLE = Path(__file__).parents[2] / "examples" / "mixflow.py"


@LEARNS
def test_replayed_blocks_take_a_fraction_of_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, learns: bool
) -> None:
    picture = tmp_path / "new" / "memory.png"
    depths, lengths = ((1, 2, 3), (1, 2, 4)) if learns else ((1, 1, 1), (1, 2, 2))
    words = (EXAMPLE, "--layers", *depths, "--steps", *lengths, "--output", picture)
    beside = os.pathsep.join(map(str, (EXAMPLE.parents[1], EXAMPLE.parent)))
    output = torchrun("--standalone", "--nproc_per_node=2", *words, PYTHONPATH=beside)
    peaks = {
        size: [float(cost) for cost in re.findall(r"(\S+) MiB", rest)]
        for size, rest in re.findall(r"^\| (\d, \d) \|(.*)$", output, re.MULTILINE)
    }
    assert list(peaks) == (["1, 2", "2, 2", "3, 2", "2, 1", "2, 4"] if learns else ["1, 2", "1, 1"])
    if learns:
        record, replayed, blocks = peaks["2, 4"]
        assert replayed < 0.6 * record
        assert blocks < 0.4 * record
        growth = [after - before for before, after in zip(peaks["1, 2"], peaks["3, 2"], strict=True)]
        assert growth[2] < 0.2 * growth[0]  # as the depth grows
        growth = [after - before for before, after in zip(peaks["2, 1"], peaks["2, 4"], strict=True)]
        assert growth[2] < 0.1 * growth[0]  # as the steps do
    assert picture.read_bytes().startswith(b"\x89PNG")

    monkeypatch.syspath_prepend(EXAMPLE.parent)
    example = imported(EXAMPLE)
    for layers, steps in ((1, 2), (2, 4)) if learns else ((1, 2),):
        (length,) = re.findall(rf"^\| {layers}, {steps} \| (\S+) \|", output, re.MULTILINE)
        here = example.meta_gradient(example.Case(layers, steps, "Recorded()")).norm()
        assert float(length) == pytest.approx(float(here), rel=1e-2)
