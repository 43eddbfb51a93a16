"""The meta-gradient of implicit MAML: its error falls with steps and products, and its memory is flat."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.running import LEARNS, numbers, rows, run_python
from tests.processes import torchrun

EXAMPLE = Path(__file__).parents[2] / "examples" / "imaml_accuracy.py"


@LEARNS
def test_errors_and_memory_are_as_in_the_paper_on_one_and_two_workers(tmp_path, learns):
    tasks, steps = (4, (1, 10, 80)) if learns else (2, (1, 4, 8))
    short = ("--tasks", tasks, "--steps", *steps, "--output", tmp_path / "a.png")
    printed = run_python(EXAMPLE, *short)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    maml, first_order, two, five, twenty = [numbers(row[1:-1]) for row in rows(printed)]
    if learns:
        assert maml[2] < 0.01 * maml[0]
        assert first_order[2] > 0.3
        assert twenty[2] < maml[2]
        assert twenty[2] < 0.1 * five[2] < 0.1 * two[2]
        assert maml[4] > 20 * maml[3]
    for flat in (first_order, two, five, twenty):
        assert flat[4] == flat[3]
    spread = [
        numbers(row[1:-1]) for row in rows(torchrun("--standalone", "--nproc_per_node=2", EXAMPLE, *short))
    ]
    for one, other in zip((maml, first_order, two, five, twenty), spread, strict=True):
        assert one == pytest.approx(other, rel=0.1)  # two digits are printed
