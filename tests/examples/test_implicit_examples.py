"""Four programs of implicit and zero-order gradients, each with small sizes: what they claim, and a picture."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from PIL import Image

from tests.examples.running import numbers, rows, run_python
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


def test_equilibria_learn_letters_as_many_iterations_do_in_the_memory_of_few(tmp_path: Path) -> None:
    short = ("--epochs", 3, "--drawings", 20, "--unrolled", 1, 32)
    printed = run("deep_equilibrium.py", tmp_path / "a.png", *short)
    found = {name: numbers(cells) for name, *cells in rows(printed)}
    assert list(found) == [
        "equilibrium, plain",
        "equilibrium, Anderson",
        "unrolled 1 times",
        "unrolled 32 times",
    ]
    plain, mixed, few, many = found.values()
    for accuracy, residual, _, _ in (plain, mixed):
        assert accuracy > 5  # of 81 classes
        assert abs(accuracy - many[0]) < 5
        assert residual <= 1e-3 < few[1]
    assert many[1] < 1e-3
    assert few[2] < plain[2] < many[2] / 2
    assert mixed[2] > plain[2]
    slow, quick = map(int, re.findall(r"(\d+) plain iterations, (\d+) by Anderson", printed)[0])
    assert quick < slow


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
