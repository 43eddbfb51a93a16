"""Every adjoint on one problem, on one worker and on two: the exact ones agree, and the samples are the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.examples.running import run_python
from tests.processes import torchrun

EXAMPLE = Path(__file__).parents[2] / "examples" / "adjoints.py"


def errors(output: str) -> dict[str, float]:
    found = re.findall(r"^(\S+) +error (\S+) +\S+ s +\S+ MiB$", output, re.MULTILINE)
    return {name: float(error) for name, error in found}


def test_two_steps_are_alike_on_one_and_two_workers(tmp_path):
    short = ["--steps", "2", "--samples", "1", "--output", str(tmp_path / "adjoints.png")]
    spread = errors(torchrun("--standalone", "--nproc_per_node=2", EXAMPLE, *short))
    assert errors(run_python(EXAMPLE, *short)) == pytest.approx(spread, rel=0.02, abs=1e-12)
    assert {"Recorded()", "SAMA()", "FiniteDifference()"} <= spread.keys()


@pytest.mark.nightly
def test_the_errors_are_ordered_and_those_of_two_workers_are_the_same(tmp_path):
    picture = tmp_path / "new" / "adjoints.png"
    short = ["--steps", "12", "--samples", "2", "--output", str(picture)]
    alone = errors(run_python(EXAMPLE, *short))
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert alone["Recorded()"] == 0
    assert max(alone["Replayed('all')"], alone["Replayed(5)"]) < 1e-12
    assert alone["Truncated(1)"] > alone["Truncated(4)"] > 0.01
    assert alone["FiniteDifference()"] == pytest.approx(alone["Truncated(1)"], rel=1e-3)
    assert len(alone) == 11
    spread = errors(torchrun("--standalone", "--nproc_per_node=2", EXAMPLE, *short))
    assert spread == pytest.approx(alone, rel=0.02, abs=1e-12)  # three digits are printed
