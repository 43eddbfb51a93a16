"""Where training is chaotic, exact gradients explode and those of evolution strategies do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.running import numbers, rows, run_python
from tests.processes import torchrun

EXAMPLE = Path(__file__).parents[2] / "examples" / "chaos.py"


def test_only_exact_gradients_explode_and_only_in_chaos_on_one_and_two_workers(tmp_path):
    short = ("--rates", 2, "--steps", 30, "--samples", 16, "--output", tmp_path / "a.png")
    table = [numbers(row[:-1]) for row in rows(run_python(EXAMPLE, *short))]
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    stable, chaotic = ([row for row in table if row[0] == rate] for rate in (1.0, 10.0))
    assert len(stable) == len(chaotic) == 6
    assert all(exact < evolution for *_, exact, evolution in stable)
    assert chaotic[-1][-2] > 1e4 * chaotic[0][-2]
    assert all(evolution < 100 for *_, evolution in chaotic)
    spread = [
        numbers(row[:-1]) for row in rows(torchrun("--standalone", "--nproc_per_node=2", EXAMPLE, *short))
    ]
    for one, other in zip(table, spread, strict=True):
        assert one[:3] == pytest.approx(other[:3], rel=0.05)
        if one[0] == 1.0:  # in chaos rounding grows, too
            assert one == pytest.approx(other, rel=0.1, abs=2e-3)
