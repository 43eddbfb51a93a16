"""Output of `examples/kubernetes/digits.py` → its curve; and the curve that one process draws."""

from __future__ import annotations

import functools
import re

import pytest

from tests.processes import ROOT, python

TRAIN = ROOT / "examples" / "kubernetes" / "digits.py"
STEP = re.compile(r"step (\d+) on (\d+) workers: ([\d.]+)")


def curve(text: str, workers: int) -> list[float]:
    """The losses of all steps, each of which must be there once, drawn by so many workers."""
    found = [(int(step), int(size), float(loss)) for step, size, loss in STEP.findall(text)]
    assert [step for step, _, _ in found] == list(range(1, 21)), text
    assert {size for _, size, _ in found} == {workers}, text
    return [loss for _, _, loss in found]


@functools.cache
def expected() -> object:
    """What a curve in double precision is to be, up to rounding."""
    done = python(TRAIN)
    assert done.returncode == 0, done.stderr
    losses = curve(done.stdout, 1)
    assert losses[-1] < 0.9 * losses[0]
    return pytest.approx(losses, rel=1e-8)
