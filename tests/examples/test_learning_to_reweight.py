"""Reweighting on one worker and on two: the same numbers, better than equal weights, and a picture."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.examples.running import run_python
from tests.processes import torchrun

EXAMPLE = Path(__file__).parents[2] / "examples" / "learning_to_reweight.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("learning_to_reweight", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def accuracies(output: str) -> dict[str, list[float]]:
    """For each way to train: the accuracy at the end, and at its best."""
    found = re.findall(
        r"^(\w[\w ]*?) +test accuracy (\S+)% at the end, (\S+)% at its best$", output, re.MULTILINE
    )
    return {name: [float(value) for value in values] for name, *values in found}


def shares(output: str) -> list[float]:
    """Of the wrong labels, in percent: their share of the examples, and of the weight."""
    return [
        float(share)
        for share in re.search(r"labels: (\S+)% of the examples, (\S+)% of the weight", output).groups()
    ]


def test_one_worker_and_two_print_the_same_and_reweighting_helps(tmp_path):
    picture = tmp_path / "new" / "weights.png"
    short = ["--steps", "100", "--seeds", "1", "--output", str(picture)]
    alone = run_python(EXAMPLE, *short)
    picture.unlink()
    spread = torchrun("--standalone", "--nproc_per_node=2", EXAMPLE, *short)
    one, two = accuracies(alone), accuracies(spread)
    assert list(one) == list(two) == ["reweighted", "noisy only", "clean only", "noisy and clean"]
    for name, values in one.items():
        assert values == pytest.approx(two[name], abs=0.3), name  # two test images
    assert shares(alone) == pytest.approx(shares(spread), abs=0.2)
    reweighted, _ = two.pop("reweighted")
    assert reweighted > two["noisy only"][0] + 3
    assert reweighted > two["noisy and clean"][0]
    of_examples, of_weight = shares(spread)
    assert of_examples == pytest.approx(60, abs=5)
    assert of_weight < of_examples - 20
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_an_answer_is_the_product_of_the_example_s_gradient_and_the_clean_one(example):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3)).double()
    batch = example.Images(torch.randn(6, 5).double(), torch.randint(3, (6,)))
    clean = example.Images(torch.randn(4, 5).double(), torch.randint(3, (4,)))
    params = list(model.parameters())
    before = [p.detach().clone() for p in params]
    answers = example.helpfulness(model, batch, clean)

    goal = torch.autograd.grad(F.cross_entropy(model(clean.x), clean.y), params)
    for x, y, answer in zip(*batch, answers, strict=True):
        own = torch.autograd.grad(F.cross_entropy(model(x), y), params)
        product = sum((mine * its).sum() for mine, its in zip(own, goal, strict=True))
        torch.testing.assert_close(answer, product)
    for now, then in zip(model.parameters(), before, strict=True):
        assert torch.equal(now, then)  # the trial step has left the model alone


def test_a_wrong_label_is_another_digit_and_no_image_is_used_twice(example):
    noisy, wrong, clean, test = example.noisy_digits(0.6, 100, torch.Generator().manual_seed(3))
    truth, _, clean_too, test_too = example.noisy_digits(0.0, 100, torch.Generator().manual_seed(3))
    assert torch.equal(noisy.x, truth.x)
    assert torch.equal(noisy.y != truth.y, wrong)
    assert wrong.double().mean() == pytest.approx(0.6, abs=0.05)
    assert torch.equal(clean.y, clean_too.y)
    assert torch.equal(test.y, test_too.y)
    assert [len(part.y) for part in (noisy, clean, test)] == [1000, 100, 697]
    images = torch.cat([noisy.x, clean.x, test.x])
    assert len(images.unique(dim=0)) == len(images)
