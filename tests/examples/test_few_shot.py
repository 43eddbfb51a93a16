"""The main job, in one process and on two workers, for some steps on few scripts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.examples.running import LEARNS, run_python
from tests.processes import torchrun

EXAMPLE = Path(__file__).parents[2] / "examples" / "few_shot.py"
SCRIPTS = ("--scripts", "GREEK", "COPTIC", "ARMENIAN")
METHODS = ["nearest neighbours", "MAML", "first-order MAML", "ordinary training", "no training"]


def accuracies(printed: str) -> list[tuple[str, str, float, float]]:
    """Shots, method, accuracy and half its interval of each row."""
    rows = re.findall(r"5-way (\d)-shot, (.*?) +(\d+\.\d) ± (\d+\.\d) %", printed)
    return [(shots, method, float(mean), float(apart)) for shots, method, mean, apart in rows]


@LEARNS
def test_one_process_and_two_workers_learn_the_same(tmp_path: Path, learns: bool) -> None:
    alone, pair = tmp_path / "alone.png", tmp_path / "new" / "pair.png"
    steps = 22 if learns else 2
    short = (*SCRIPTS, "--steps", steps, "--tasks", 2, "--test-tasks", 8)
    first = run_python(EXAMPLE, *short, "--output", alone)
    words = (*short, "--output", pair, "--tensorboard", tmp_path / "curves")
    second = torchrun("--standalone", "--nproc_per_node=2", EXAMPLE, *words)
    assert f"{steps} steps of 2 tasks by each method" in first
    assert "times as fast" not in first
    assert len(re.findall(r"[\d.]+ s on one worker, [\d.]+ s on 2: [\d.]+ times as fast", second)) == 1
    one, two = accuracies(first), accuracies(second)
    assert [row[:2] for row in one] == [row[:2] for row in two] == [(k, m) for k in "15" for m in METHODS]
    for here, there in zip(one, two, strict=True):
        assert here[2:] == pytest.approx(there[2:], abs=6)  # a letter of a hundred may be on the other side
    assert dict(row[1:3] for row in one)["nearest neighbours"] > 50
    for path in (alone, pair):
        assert path.read_bytes().startswith(b"\x89PNG")
    assert list((tmp_path / "curves").iterdir())


def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    short: Sequence[object] = (*SCRIPTS, "--steps", 22, "--tasks", 1, "--test-tasks", 4)
    files = ("--output", tmp_path / "picture.png", "--checkpoint", tmp_path / "state")
    first = run_python(EXAMPLE, *short, *files)
    assert "22 steps of 1 tasks by each method" in first
    again = run_python(EXAMPLE, *short, *files)  # from step 20
    assert re.search(r"^2 steps of 1 tasks by each method", again, re.MULTILINE)
    assert accuracies(again) == accuracies(first)


def test_help_names_the_long_version() -> None:
    assert "--minutes" in run_python(EXAMPLE, "--help")


def test_the_program_is_read_on_three_screens() -> None:
    assert len(EXAMPLE.read_text("utf-8").splitlines()) <= 150
