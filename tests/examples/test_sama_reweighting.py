"""Weights learned beside training: wrong labels lose theirs, whichever adjoint of one step, and there is a picture."""

from __future__ import annotations

import re
from pathlib import Path

from tests.examples.running import run_python

EXAMPLE = Path(__file__).parents[2] / "examples" / "sama_reweighting.py"


def test_wrong_labels_lose_their_weight(tmp_path):
    picture = tmp_path / "new" / "weights.png"
    output = run_python(EXAMPLE, "--steps", "40", "--meta-lr", "1.0", "--output", picture)
    found = re.findall(
        r"^(\S.*?) +test accuracy \S+%, wrong labels have (\S+)% of the weight", output, re.MULTILINE
    )
    shares = {name: float(share) for name, share in found}
    assert list(shares) == ["equal weights", "Truncated(1)", "FiniteDifference()", "SAMA()"]
    exact = shares["Truncated(1)"]
    assert exact < shares["equal weights"] - 10
    assert abs(shares["FiniteDifference()"] - exact) < 0.5
    assert abs(shares["SAMA()"] - exact) < 2
    assert picture.read_bytes().startswith(b"\x89PNG")
