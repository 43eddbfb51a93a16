"""Data chosen through all steps beats a random choice; a few poisoned images raise the loss; the memory is small."""

from __future__ import annotations

import re
from pathlib import Path

from tests.examples.running import run_python

EXAMPLE = Path(__file__).parents[2] / "examples" / "metagradients.py"


def test_metagradients_choose_and_poison_data(tmp_path: Path) -> None:
    picture = tmp_path / "new" / "data.png"
    output = run_python(EXAMPLE, "--steps", 60, "--meta-steps", 2, "--output", picture)
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
    assert picture.read_bytes().startswith(b"\x89PNG")
