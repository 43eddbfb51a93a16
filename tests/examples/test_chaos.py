"""Where training is chaotic, exact gradients explode and those of evolution strategies do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.running import LEARNS, imported, numbers, rows
from tests.processes import torchrun

EXAMPLE = Path(__file__).parents[2] / "examples" / "chaos.py"


@LEARNS
def test_only_exact_gradients_explode_and_only_in_chaos_on_one_and_two_workers(tmp_path, learns):
    short = ("--rates", 2, "--steps", 30, "--samples", 16, "--output", tmp_path / "a.png")
    printed = torchrun("--standalone", "--nproc_per_node=2", EXAMPLE, *short)
    table = [numbers(row[:-1]) for row in rows(printed)]
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    stable, chaotic = ([row for row in table if row[0] == rate] for rate in (1.0, 10.0))
    assert len(stable) == len(chaotic) == 6
    assert all(exact < evolution for *_, exact, evolution in stable)
    assert chaotic[-1][-2] > 1e4 * chaotic[0][-2]
    assert all(evolution < 100 for *_, evolution in chaotic)
    example = imported(EXAMPLE)
    for row in table if learns else (*stable[:4], *chaotic[:4]):  # in this process
        losses, exact, evolution = example.spread(example.Case(row[0], int(row[1])), 16, 0.05, 0)
        assert row[2] == pytest.approx(float(losses.mean()), rel=0.05)
        if row[0] == 1.0:  # in chaos rounding grows, too
            assert row[3:] == pytest.approx([float(losses.std()), exact, evolution], rel=0.1, abs=2e-3)
