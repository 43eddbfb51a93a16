"""Three steps of one script on two, one and two workers; each does its work, and the numbers do not hang on theirs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "pipeline_of_steps.py"
PERCENT = re.compile(r"(\d+\.\d)%")


def run(*arguments: str) -> str:
    ended = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLE, *arguments],
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    return ended.stdout


@pytest.mark.timeout(130)
def test_the_steps_run_and_adapting_helps() -> None:
    two = run("--steps", "80")
    pre_train, adapt, test = two.splitlines()
    assert pre_train.startswith("pre-train on 2 workers")
    assert adapt == "adapt on 1 worker: 100 turned images"
    assert test.startswith("test on 2 workers")
    (upright,) = map(float, PERCENT.findall(pre_train))
    before, after = map(float, PERCENT.findall(test))
    assert upright > 80
    assert before < 30
    assert after > 60
    one = run("--steps", "80", "--workers", "1")
    for a, b in zip(PERCENT.findall(one), PERCENT.findall(two), strict=True):
        assert float(a) == pytest.approx(float(b), abs=2.0)
