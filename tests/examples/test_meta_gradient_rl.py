"""Discount and trace learned online: a right meta-gradient, and less error than fixed ones, on any workers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.examples.running import imported, run_python, table
from tests.processes import torchrun

EXAMPLE = Path(__file__).parents[2] / "examples" / "meta_gradient_rl.py"


def test_returns_are_the_mean_of_those_of_n_steps() -> None:
    """G = (1 - λ) Σ λⁿ⁻¹ G⁽ⁿ⁾, with the last term's weight what is left (Sutton and Barto, 2018, section 12.1)."""
    example = imported(EXAMPLE)
    generator = torch.Generator().manual_seed(0)
    values, rewards = (torch.randn(size, generator=generator, dtype=torch.float64) for size in (6, 14))
    discount, trace = 0.9, 0.7
    logits = [torch.full((6,), number, dtype=torch.float64).logit() for number in (discount, trace)]
    found = example.returns(values, rewards, example.Targets(*logits))
    for start in (0, 5, 13):
        expected, left = 0.0, 1.0
        for steps in range(1, 15 - start):
            of_n = sum(discount**k * float(rewards[start + k]) for k in range(steps))
            if start + steps < 14:
                of_n += discount**steps * float(values[example.SEEN[start + steps]])
                expected += left * (1 - trace) * of_n
                left *= trace
            else:
                expected += left * of_n
        assert float(found[start]) == pytest.approx(expected)


def test_the_meta_gradient_is_the_finite_difference() -> None:
    example = imported(EXAMPLE)
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    values, episodes = randn(6).requires_grad_(), randn(2, 14)

    def next_loss(discount: torch.Tensor, trace: torch.Tensor) -> torch.Tensor:
        return example.after_step(example.Targets(discount, trace), values, episodes, 0.05)[0]

    assert torch.autograd.gradcheck(next_loss, (randn(6).requires_grad_(), randn(6).requires_grad_()))


@pytest.mark.nightly
def test_learned_ones_beat_the_best_fixed(tmp_path: Path) -> None:
    words = ("--runs", 16, "--episodes", 240, "--lr", 0.1, "--meta-lr", 0.2)
    rows = {row[0]: row for row in table(run_python(EXAMPLE, *words, "--output", tmp_path / "one.png"))[1:]}
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")
    gain, half = (float(number) for number in rows["learned online"][3].split(" ± "))
    assert gain > half
    discounts = [float(number) for number in rows["learned online"][4].split(", ")]
    traces = [float(number) for number in rows["learned online"][5].split(", ")]
    assert min(discounts[:2]) > 0.7 > 0.3 > discounts[2]
    assert traces[1] > 0.6


def test_one_worker_and_two_live_alike(tmp_path: Path) -> None:
    words = (EXAMPLE, "--runs", 3, "--episodes", 12, "--output", tmp_path / "picture.png")
    one = table(run_python(*words))
    assert one[3][0] == "learned online"
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert one == table(torchrun("--standalone", "--nproc_per_node=2", *words))
