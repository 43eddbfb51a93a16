"""The rates learned on one worker and on two: the same numbers, better than the grid, and a picture."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch

from tests.examples.running import run_python
from tests.processes import torchrun

EXAMPLE = Path(__file__).parents[2] / "examples" / "learned_learning_rate.py"
ROW = re.compile(
    r"^(\w+) +rates (\S+) to (\S+), momentum (\S+) \| validation loss (\S+) \| test loss (\S+), accuracy (\S+)%$",
    re.MULTILINE,
)


def rows(output: str) -> dict[str, list[float]]:
    """For each contestant: its first rate, its last, its momentum, validation loss, test loss, accuracy."""
    return {name: [float(value) for value in values] for name, *values in ROW.findall(output)}


def learn(picture, *sizes, workers=2):
    arguments = (EXAMPLE, *sizes, "--output", picture)
    if workers == 1:
        return rows(run_python(*arguments))
    return rows(torchrun("--standalone", f"--nproc_per_node={workers}", *arguments))


def test_one_worker_and_two_learn_the_same_rates(tmp_path):
    short = ("--outer-steps", 4, "--inner-steps", 2, "--tasks", 4)  # the grid is searched, too
    one, two = (learn(tmp_path / "rates.png", *short, workers=workers) for workers in (1, 2))
    assert list(one) == list(two) == ["constant", "falling", "learned"]
    for name, values in one.items():
        assert values == pytest.approx(two[name], rel=0.01), name


@pytest.mark.nightly
def test_learned_rates_beat_the_grid(tmp_path):
    picture = tmp_path / "new" / "rates.png"
    found = learn(picture, "--outer-steps", 40, "--inner-steps", 12, "--tasks", 8)
    *_, validation, test, accuracy = found["learned"]
    for name in ("constant", "falling"):
        assert validation < found[name][3]
        assert test < found[name][4]
    assert accuracy > 70
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_gradient_of_a_rate_is_the_finite_difference():
    spec = importlib.util.spec_from_file_location("learned_learning_rate", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    params = {"w1": randn(6, 4), "b1": randn(4), "w2": randn(4, 10), "b2": randn(10)}
    images = example.Images(randn(8, 6), torch.arange(8))
    task = example.Task(params, torch.randint(8, (3, 5), generator=generator))

    def outer_loss(rates, momentum):
        hyper = example.Hyper(rates, momentum)
        return example.train_and_evaluate.__wrapped__(task, hyper, images, images).loss

    rates, momentum = torch.full((3,), 0.3, dtype=torch.float64), torch.tensor(0.8, dtype=torch.float64)
    assert torch.autograd.gradcheck(outer_loss, (rates.requires_grad_(), momentum.requires_grad_()))
