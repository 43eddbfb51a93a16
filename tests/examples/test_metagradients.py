"""A schedule learned through all steps beats one learned through the last ones, in less memory than a record."""

from __future__ import annotations

import re
from pathlib import Path

from tests.examples.running import run_python

EXAMPLE = Path(__file__).parents[2] / "examples" / "metagradients.py"


def test_all_steps_teach_more_than_the_last_twenty(tmp_path):
    picture = tmp_path / "new" / "schedule.png"
    short = ["--steps", "60", "--outer-steps", "3", "--memory", "400KiB"]
    output = run_python(EXAMPLE, *short, "--output", picture)
    found = re.findall(r"^(\S+) +test accuracy \S+%, validation loss (\S+),", output, re.MULTILINE)
    losses = {name: float(loss) for name, loss in found}
    assert losses["Replayed"] < losses["Truncated(20)"] - 0.005
    found = re.findall(r"^(\S+) +peak (\S+) MiB at 6 steps, (\S+) MiB at 60$", output, re.MULTILINE)
    growth = {name: float(many) - float(few) for name, few, many in found}
    assert growth["Replayed"] < 0.1 * growth["Recorded"]
    assert picture.read_bytes().startswith(b"\x89PNG")
