"""Four programs of implicit and zero-order gradients, each with small sizes: what they claim, and a picture."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from PIL import Image

from tests.examples.running import run_python
from tests.processes import torchrun

EXAMPLES = Path(__file__).parents[2] / "examples"
PERCENT = re.compile(r"(\d+\.\d)%")


def run(name: str, picture: Path, *arguments: object) -> str:
    """What a program prints; its picture is one."""
    printed = run_python(EXAMPLES / name, "--output", picture, *arguments)
    check(picture)
    return printed


def check(picture: Path) -> None:
    with Image.open(picture) as image:
        assert image.format == "PNG"
        assert np.asarray(image.convert("L")).std() > 5  # something is drawn


def test_penalties_have_the_closed_form_s_gradient(tmp_path: Path) -> None:
    printed = run("ridge_hyperparameters.py", tmp_path / "a.png", "--steps", 25)
    (error,) = re.findall(r"relative error (\S+) at most", printed)
    assert float(error) < 1e-9
    first, last, single = map(
        float, re.findall(r"test loss (\S+) -> (\S+); best single penalty (\S+)", printed)[0]
    )
    assert last < first
    assert last < single


def test_equilibria_learn_digits_by_either_adjoint(tmp_path: Path) -> None:
    accuracies = []
    for adjoint in ("implicit", "unrolled"):
        printed = run(
            "deep_equilibrium.py", tmp_path / "a.png", "--epochs", 1, "--width", 32, "--adjoint", adjoint
        )
        accuracies.append([float(value) for value in PERCENT.findall(printed)])
        mixed, plain = map(int, re.findall(r"(\d+) iterations by Anderson, (\d+) plain", printed)[-1])
        assert mixed < plain
    implicit, unrolled = (values[-1] for values in accuracies)
    assert implicit > 25
    assert abs(implicit - unrolled) < 10


def test_a_pole_is_balanced_alike_on_one_and_two_workers(tmp_path: Path) -> None:
    short = ("--steps", 4, "--samples", 16, "--episodes", 2, "--lr", 0.3)
    alone = run("evolution_strategies.py", tmp_path / "a.png", *short)
    pair = torchrun(
        "--standalone",
        "--nproc_per_node=2",
        EXAMPLES / "evolution_strategies.py",
        "--output",
        tmp_path / "b.png",
        *short,
        timeout=100,
    )
    check(tmp_path / "b.png")
    seconds = [[float(value) for value in re.findall(r"up for (\d+\.\d+) s", text)] for text in (alone, pair)]
    assert seconds[0] == seconds[1]
    assert seconds[0][-1] > seconds[0][0]
    assert "on 1 worker(s)" in alone
    assert "on 2 worker(s)" in pair


def test_implicit_maml_learns_to_adapt(tmp_path: Path) -> None:
    short = ("--meta-steps", 20, "--tasks", 4, "--test-tasks", 20, "--eval-every", 20)
    short = (*short, "--proximity", 5, "--inner-steps", 10, "--lr", 3e-3)  # gains more in few steps
    printed = run("imaml_digits.py", tmp_path / "a.png", *short)
    first, last = (float(PERCENT.findall(line)[0]) for line in printed.splitlines() if "accuracy" in line)
    assert last > first + 4
