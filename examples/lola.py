"""Two players of the prisoner's dilemma who learn to cooperate, each by a gradient through the other's learning.

    python examples/lola.py
    torchrun --nproc_per_node=2 examples/lola.py

If each player follows the gradient of its own payoff, both defect. Learning with Opponent-Learning Awareness (LOLA,
Foerster et al., 2018, https://arxiv.org/abs/1709.04326) follows the gradient of a player's payoff *after the opponent's
next learning step*. This is a second-order derivative that goes from one agent into the other. Both players then learn
tit for tat.

A policy is five probabilities: to cooperate in the first round, and after each outcome of the previous round. The
payoff of the infinite game, in which each round counts 0.96 times the one before, is computed exactly from one linear
system of four equations.

The pairs of players are independent. They are spread over the workers, and each worker computes all its pairs at once
(``vectorize=True``). On one worker or on many, the numbers printed are the same up to rounding. There is so little
arithmetic that a second worker gains nothing here; it would if policies were networks and payoffs needed many games.

Of 32 pairs, after 200 steps:

             payoff a round    probability to cooperate, at first and after CC, CD, DC, DD (median)
    naive    -2.00             0.01, 0.14, 0.04, 0.05, 0.00
    LOLA     -1.12             1.00, 1.00, 0.03, 0.99, 0.01
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.func import grad

import torchopt_dist as todist

PAYOFFS = torch.tensor([[-1.0, -1.0], [-3.0, 0.0], [0.0, -3.0], [-2.0, -2.0]])
"""Of both players after CC, CD, DC, DD: what the first and the second did."""

DISCOUNT = 0.96


class Players(NamedTuple):
    """Logits of cooperating, of shape (5,): in the first round, and after CC, CD, DC, DD as each player sees them."""

    first: Tensor
    second: Tensor


def payoffs(first: Tensor, second: Tensor) -> Tensor:
    """The discounted sum of all rounds, for both players; of shape (2,)."""
    p = first.sigmoid()
    q = second.sigmoid()[[0, 1, 3, 2, 4]]  # its CD is the first player's DC
    outcomes = torch.stack([p * q, p * (1 - q), (1 - p) * q, (1 - p) * (1 - q)], dim=-1)
    start, transition = outcomes[0], outcomes[1:]
    visits = torch.linalg.solve(torch.eye(4) - DISCOUNT * transition.mT, start)
    return visits @ PAYOFFS


@todist.parallelize(todist.tasks, todist.sum_reducer, vectorize=True)
def anticipated(players: Players, look_ahead: float) -> Tensor:
    """The sum of what each player of a pair expects after a step of the other's; each term moves its own player only.

    A step of the other's is a function of this player's policy, and the payoff is differentiated through it.
    """
    first, second = players.first, players.second
    second_step = grad(lambda other: payoffs(first, other)[1])(second.detach())
    first_step = grad(lambda other: payoffs(other, second)[0])(first.detach())
    expects_first = payoffs(first, second.detach() + look_ahead * second_step)[0]
    expects_second = payoffs(first.detach() + look_ahead * first_step, second)[1]
    return expects_first + expects_second


@todist.rank_zero_only
def train(args: argparse.Namespace, write: todist.typing.WriteScalars) -> None:
    histories, learned = {}, {}
    for name, look_ahead in (("naive", 0.0), ("LOLA", args.look_ahead)):
        draw_policy = torch.Generator().manual_seed(args.seed)
        players = Players(
            *(torch.randn(args.pairs, 5, generator=draw_policy).requires_grad_() for _ in range(2))
        )
        optimizer = todist.SGD(players, lr=args.lr, maximize=True)
        history = []
        for step in range(args.steps):
            with torch.no_grad():
                history.append((1 - DISCOUNT) * torch.vmap(payoffs)(*players).mean(dim=1))
            write(step, {f"payoff a round/{name}": history[-1].mean()})
            optimizer.zero_grad()
            expected: Tensor = anticipated(players, look_ahead)
            expected.backward()
            optimizer.step()
        histories[name] = torch.stack(history)
        learned[name] = players.first.detach().sigmoid()
        tit_for_tat = ", ".join(f"{p:.2f}" for p in learned[name].median(dim=0).values.tolist())
        print(f"{name:5s} payoff a round {histories[name][0].mean():.2f} -> {histories[name][-1].mean():.2f}")
        print(f"      cooperates at first, after CC, CD, DC, DD: {tit_for_tat}")
    draw(histories, learned, args.output)


def draw(histories: dict[str, Tensor], learned: dict[str, Tensor], output: Path) -> None:
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    curves, policies = figure.subplots(1, 2, width_ratios=[1.4, 1])
    for shift, (name, history) in zip((-0.2, 0.2), histories.items(), strict=True):
        colour = "C0" if name == "LOLA" else "C1"
        curves.plot(history.numpy(), colour, alpha=0.15)
        curves.plot(history.mean(dim=1).numpy(), colour, linewidth=3, label=name)
        policies.bar(
            [x + shift for x in range(5)], learned[name].median(dim=0).values.tolist(), 0.38, color=colour
        )
    curves.axhline(-1, color="0.6", linestyle=":", label="both cooperate")
    curves.axhline(-2, color="0.6", linestyle="--", label="both defect")
    curves.set(xlabel="steps", ylabel="payoff a round", title="pairs of players, and their mean")
    curves.legend()
    policies.set(title="probability to cooperate, median", ylim=(0, 1))
    policies.set_xticks(range(5), ["at first", "CC", "CD", "DC", "DD"])
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=120)
    print(f"picture: {output}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Learning with opponent-learning awareness.")
    parser.add_argument("--pairs", type=int, default=32, help="of players (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="of both players (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=1.0, help="of either player (default: %(default)s)")
    parser.add_argument(
        "--look-ahead", type=float, default=1.0, help="rate of the other's step (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("outputs/lola.png"), help="picture to draw")
    parser.add_argument("--tensorboard", type=Path, metavar="FOLDER", help="write the curves there, too")
    return parser.parse_args()


@todist.auto_init_rpc(lambda: torch.set_num_threads(1))
def main() -> None:
    args = parse_arguments()
    with todist.scalar_writer(args.tensorboard) as write:
        train(args, write)


if __name__ == "__main__":
    main()
