"""Three steps of one script on two, one and two workers; each does its work, and the numbers do not hang on theirs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.examples.running import run_python

EXAMPLE = Path(__file__).parents[2] / "examples" / "pipeline_of_steps.py"
PERCENT = re.compile(r"(\d+\.\d)%")


def test_the_steps_run_on_as_many_workers_as_they_say(tmp_path: Path) -> None:
    pre_train, adapt, test, drawn = run_python(
        EXAMPLE, "--steps", "2", "--output", tmp_path / "steps.png"
    ).splitlines()
    assert pre_train.startswith("pre-train on 2 workers")
    assert adapt.startswith("adapt on 1 worker: ")
    assert test.startswith("test on 2 workers")
    assert drawn == f"picture: {tmp_path / 'steps.png'}"


@pytest.mark.nightly
def test_the_steps_run_and_adapting_helps(tmp_path: Path) -> None:
    picture = tmp_path / "steps.png"
    output = ("--steps", "80", "--output", str(picture))
    two = run_python(EXAMPLE, *output)
    pre_train, adapt, test, drawn = two.splitlines()
    assert drawn == f"picture: {picture}"
    assert picture.stat().st_size > 10_000
    assert pre_train.startswith("pre-train on 2 workers")
    assert adapt == "adapt on 1 worker: 100 turned images"
    assert test.startswith("test on 2 workers")
    (upright,) = map(float, PERCENT.findall(pre_train))
    before, after = map(float, PERCENT.findall(test))
    assert upright > 80
    assert before < 30
    assert after > 60
    one = run_python(EXAMPLE, *output, "--workers", "1")
    for a, b in zip(PERCENT.findall(one), PERCENT.findall(two), strict=True):
        assert float(a) == pytest.approx(float(b), abs=2.0)
