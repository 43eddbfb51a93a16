"""MAML for navigation: its estimator's second order, and policies that find new goals, on one worker and on two."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.examples.running import LEARNS, imported, run_python, table
from tests.processes import torchrun

EXAMPLE = Path(__file__).parents[2] / "examples" / "maml_navigation.py"
MOVES, DISCOUNT = 3, 0.9
REWARDS = torch.tensor([[1.0, -0.5], [0.3, 2.0]], dtype=torch.float64)
"""Of each action in each state, the last action; the first state is 0."""


def log_probs_and_rewards(logits: Tensor, actions: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Of one episode."""
    chosen = logits.log_softmax(dim=1)
    states = (0, *actions[:-1])
    pairs = list(zip(states, actions, strict=True))
    return torch.stack([chosen[pair] for pair in pairs]), torch.stack([REWARDS[pair] for pair in pairs])


def expected_return(logits: Tensor) -> Tensor:
    """By enumeration of all episodes."""
    total = logits.new_zeros(())
    weights = DISCOUNT ** torch.arange(MOVES)
    for actions in itertools.product((0, 1), repeat=MOVES):
        log_probs, rewards = log_probs_and_rewards(logits, actions)
        total = total + log_probs.sum().exp() * (weights * rewards).sum()
    return total


def test_derivatives_of_the_estimator_are_right_in_the_mean_to_order_two() -> None:
    """Over all pairs of episodes, each counted as often as it comes."""
    example = imported(EXAMPLE)
    logits = torch.tensor([[0.3, -0.4], [0.1, 0.8]], dtype=torch.float64)

    def mean_estimate(logits: Tensor) -> Tensor:
        total = logits.new_zeros(())
        for pair in itertools.product(itertools.product((0, 1), repeat=MOVES), repeat=2):
            columns = [log_probs_and_rewards(logits, actions) for actions in pair]
            log_probs, rewards = (torch.stack(part, dim=1) for part in zip(*columns, strict=True))
            total = total + log_probs.detach().sum().exp() * example.dice(log_probs, rewards, DISCOUNT)
        return total

    for derivative in (
        lambda function: function(logits),
        lambda function: torch.autograd.functional.jacobian(function, logits),
        lambda function: torch.autograd.functional.hessian(function, logits),
    ):
        torch.testing.assert_close(derivative(mean_estimate), derivative(expected_return))


def test_an_episode_ends_at_the_goal_and_moves_are_short() -> None:
    example = imported(EXAMPLE)
    goal = torch.tensor([0.2, 0.0])

    def straight(position: Tensor) -> tuple[Tensor, Tensor]:
        return torch.stack([torch.ones_like(position[..., 0]), 0 * position[..., 1]], dim=-1), torch.ones(2)

    log_probs, rewards, positions = example.episodes(straight, goal, torch.zeros(4, 3, 2))
    torch.testing.assert_close(positions[:, 0, 0], torch.tensor([0.0, 0.1, 0.2, 0.3]))
    torch.testing.assert_close(rewards[:, 0], torch.tensor([-0.01, 0.0, 0.0, 0.0]))
    assert log_probs.shape == rewards.shape == (4, 3)


@LEARNS
def test_after_a_step_the_policy_goes_to_new_goals_alike_on_one_and_two_workers(
    tmp_path: Path, learns: bool
) -> None:
    steps, tasks, new = (15, 8, 16) if learns else (2, 2, 4)
    words = (EXAMPLE, "--meta-steps", steps, "--tasks", tasks, "--test-tasks", new, "--output")
    one = table(run_python(*words, tmp_path / "one.png"))
    two = table(torchrun("--standalone", "--nproc_per_node=2", *words, tmp_path / "two.png"))
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")
    returns = [
        {row[0]: [float(cell.split()[0]) for cell in row[2:]] for row in rows[1:]} for rows in (one, two)
    ]
    for name, of_one in returns[0].items():
        assert returns[1][name] == pytest.approx(of_one, abs=0.02)
    maml, ordinary = returns[0]["MAML"], returns[0]["pre-training"]
    if not learns:
        return
    assert maml[1] > maml[0] + 0.5
    assert maml[3] - maml[0] > ordinary[3] - ordinary[0] + 0.5
