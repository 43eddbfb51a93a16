"""One inner loop on one worker and on a team of two: the same numbers, and a picture."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.examples.running import LEARNS
from tests.processes import finish, start_python, start_torchrun

EXAMPLE = Path(__file__).parents[2] / "examples" / "maml_parallel_inner.py"


@LEARNS
def test_one_worker_and_two_print_the_same(tmp_path, learns):
    steps, filters, images = (6, 8, 200) if learns else (2, 4, 40)
    sizes = ("--meta-steps", steps, "--filters", filters, "--images", images)
    short = ["--double", *sizes, "--output"]
    alone, spread = finish(
        start_python("-W", "error", EXAMPLE, *short, tmp_path / "alone.png"),
        start_torchrun("--standalone", "--nproc_per_node=2", EXAMPLE, *short, tmp_path / "spread.png"),
    )
    losses = [
        [float(loss) for loss in re.search(r"outer loss: (\S+) at first, (\S+) after", output).groups()]
        for output in (alone, spread)
    ]
    assert losses[0] == pytest.approx(losses[1], abs=2e-4)
    if learns:
        assert losses[1][1] < losses[1][0] - 0.1
    assert "on 2 worker(s)" in spread
    for name in ("alone.png", "spread.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
