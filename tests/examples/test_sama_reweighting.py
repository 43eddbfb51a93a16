"""Learned weights beat equal ones where most labels are wrong, and SAMA takes less memory, on two workers as on one."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

import pytest

from tests.examples.running import imported
from tests.processes import torchrun

EXAMPLE = Path(__file__).parents[2] / "examples" / "sama_reweighting.py"


def test_learned_weights_beat_equal_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = tmp_path / "new" / "weights.png"
    words = ("--noise", 0.6, "--seeds", 1, "--steps", 250, "--meta-lr", 0.05, "--output", picture)
    beside = os.pathsep.join(map(str, (EXAMPLE.parents[1], EXAMPLE.parent)))
    output = torchrun("--standalone", "--nproc_per_node=2", EXAMPLE, *words, PYTHONPATH=beside)
    (row,) = re.findall(r"^\| 60% " + 4 * r"\| (\S+)% \(.*?\) " + r"\|", output, re.MULTILINE)
    plain, exact, sama, oracle = map(float, row)
    assert plain + 5 < sama < oracle
    assert plain + 5 < exact < oracle
    (row,) = re.findall(r"^\| memory \| (\S+) MiB \| (\S+) MiB \| (\S+) MiB \|", output, re.MULTILINE)
    without, record, difference = map(float, row)
    assert without < difference < 0.6 * record
    assert picture.read_bytes().startswith(b"\x89PNG")

    monkeypatch.syspath_prepend(EXAMPLE.parent)
    example = imported(EXAMPLE)
    args = argparse.Namespace(steps=250, unroll=5, lr=0.003, meta_lr=0.05)
    here = 100 * example.train(example.Run(0.6, "plain", 0), args).accuracy
    assert plain == pytest.approx(here, abs=0.2)  # one image of 697 is 0.14 %
