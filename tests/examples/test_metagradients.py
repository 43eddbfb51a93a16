"""Data chosen through all steps beats a random choice; a few poisoned images raise the loss; the memory is small."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.examples.running import LEARNS, numbers, run_python
from tests.examples.running import rows as table_rows
from tests.processes import torchrun

EXAMPLE = Path(__file__).parents[2] / "examples" / "metagradients.py"


@LEARNS
def test_metagradients_choose_and_poison_data(tmp_path: Path, learns: bool) -> None:
    picture = tmp_path / "new" / "data.png"
    steps, meta_steps = (60, 2) if learns else (8, 1)
    words = (EXAMPLE, "--steps", steps, "--meta-steps", meta_steps, "--output")
    output = run_python(*words, picture)
    beside = os.pathsep.join(map(str, (EXAMPLE.parents[1], EXAMPLE.parent)))
    spread = torchrun("--standalone", "--nproc_per_node=2", *words, tmp_path / "two.png", PYTHONPATH=beside)
    for one, two in zip(table_rows(output), table_rows(spread), strict=True):
        assert numbers(one) == pytest.approx(numbers(two), rel=0.02)
    assert picture.read_bytes().startswith(b"\x89PNG")
    if not learns:
        return
    rows = {
        name: (float(wrong), float(accuracy), float(loss))
        for name, wrong, accuracy, loss in re.findall(
            r"^\| (.*?) \| (\S+)% \| (\S+)% \| (\S+) \|", output, re.MULTILINE
        )
    }
    everything, random, truncated, replayed, right, clean, noise, poison = rows.values()
    assert everything[0] > 35
    assert replayed[0] < truncated[0] < random[0] / 2
    assert replayed[1] > random[1] + 3
    assert right[0] == 0
    assert replayed[2] < truncated[2] < random[2]
    assert poison[2] > noise[2] > clean[2] - 0.05
    (found,) = re.findall(r"lowest worth, (\S+)% have a wrong label", output)
    assert float(found) > 75
    (record, snapshots) = map(float, re.findall(r"(\S+) MiB by", output))
    assert snapshots < 0.4 * record
