"""Two players who learn to cooperate, each by a gradient through the other's learning: the table of the LOLA paper.

    python examples/lola.py
    torchrun --nproc_per_node=2 examples/lola.py

Learning with Opponent-Learning Awareness (LOLA, Foerster et al., 2018, https://arxiv.org/abs/1709.04326) follows the
gradient of a player's payoff *after the opponent's next learning step*. That step is an inner loop of one step, and the
adjoint says who learns: with ``Recorded`` the gradient goes through the step, which is LOLA; with ``FirstOrder`` the
step is foreseen, but its derivative is left out. A naive learner foresees nothing. A policy is five probabilities: to
cooperate (or show heads) in the first round, and after each outcome of the round before. The payoff of the infinite
game is exact, from one linear system of four equations.

Claim, with exact payoffs (Table 3): in the iterated prisoner's dilemma naive learners defect, and LOLA plays tit for
tat; in iterated matching pennies LOLA finds the Nash equilibrium, to show heads half of the time, and naive learners do
not. Here a state of a policy counts as learned if its probability is within 0.02 of that; with this guess naive
learners have the paper's percentage. The paper expands the payoff to first order in the opponent's step; here the step
itself is differentiated. A run is a pair of players. Runs are spread over the workers, and each worker computes all of
its runs at once; there is so little arithmetic that the second worker gains nothing with fewer than thousands.

Result: of 400 runs, naive learners get -1.99 a round and play 21 % tit for tat, LOLA gets -1.06 and plays 75 %; of the
pennies they learn 0 % and 100 %. The step without its derivative is enough for the pennies, and not for the dilemma.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.func import grad

import torchopt_dist as todist

NEAR = 0.02
"""How far a probability may be from what it should be."""


class Game(NamedTuple):
    """What both players get in a round, of shape (4, 2), after CC, CD, DC, DD: what the first and the second did."""

    payoffs: Tensor
    discount: float
    """What a round counts, as a part of the one before."""
    should: Tensor
    """Probabilities of cooperating, of shape (5,), that players should learn."""


GAMES = {
    "dilemma": Game(
        torch.tensor([[-1, -1], [-3, 0], [0, -3], [-2, -2]], dtype=torch.float64),
        0.96,
        torch.tensor([1, 1, 0, 1, 0], dtype=torch.float64),  # tit for tat
    ),
    "pennies": Game(
        torch.tensor([[-1, 1], [1, -1], [1, -1], [-1, 1]], dtype=torch.float64),
        0.9,
        torch.full((5,), 0.5, dtype=torch.float64),  # the Nash equilibrium
    ),
}
LEARNERS = {"naive": None, "foresees": todist.FirstOrder(), "LOLA": todist.Recorded()}
"""How each takes the gradient through the other's step, if at all."""
PAPER = {
    ("dilemma", "naive"): ("20.8", "-1.98 (0.14)"),
    ("dilemma", "LOLA"): ("81.0", "-1.06 (0.19)"),
    ("pennies", "naive"): ("0.0", "0 (0.37)"),
    ("pennies", "LOLA"): ("98.8", "0 (0.02)"),
}
"""Its Table 3, exact: percentage; mean and standard deviation of the payoff a round, at the end of 50 runs."""


class Players(NamedTuple):
    """Logits of cooperating, of shape (5,): in the first round, and after CC, CD, DC, DD as each player sees them."""

    first: Tensor
    second: Tensor


def values(players: Players, game: Game) -> Tensor:
    """The payoff of both players, of shape (2,), summed over all rounds with their discounts."""
    p = players.first.sigmoid()
    q = players.second.sigmoid()[[0, 1, 3, 2, 4]]  # its CD is the first player's DC
    outcomes = torch.stack([p * q, p * (1 - q), (1 - p) * q, (1 - p) * (1 - q)], dim=-1)
    start, transition = outcomes[0], outcomes[1:]
    visits = torch.linalg.solve(torch.eye(4, dtype=p.dtype) - game.discount * transition.mT, start)
    return visits @ game.payoffs


def ascent(players: Players, me: int, game: Game, learner: str, look_ahead: float) -> Tensor:
    """The gradient that a player follows: of its payoff after the other's step."""
    optimizer = todist.sgd(lr=look_ahead, maximize=True)
    adjoint = LEARNERS[learner]

    def payoff(own: Tensor, other: Tensor, whose: int) -> Tensor:
        return values(Players(own, other) if me == 0 else Players(other, own), game)[whose]

    def expected(own: Tensor) -> Tensor:
        other = players[1 - me]
        if adjoint is not None:
            step = partial(payoff, own, whose=1 - me)
            other = todist.inner_loop(step, optimizer, other, 1, adjoint=adjoint).params
        return payoff(own, other, me)

    return grad(expected)(players[me])


@todist.parallelize(todist.tasks, todist.stack_reducer, vectorize=True)
def learn(players: Players, game: str, learner: str, args: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """A run → both players' payoff a round before each step, and their last policies, of shapes (steps, 2), (2, 5)."""
    history = []
    for _ in range(args.steps):
        history.append((1 - GAMES[game].discount) * values(players, GAMES[game]))
        ascents = [ascent(players, me, GAMES[game], learner, args.look_ahead) for me in (0, 1)]
        players = Players(*(own + args.lr * up for own, up in zip(players, ascents, strict=True)))
    return torch.stack(history), torch.stack(players).sigmoid()


def interval(runs: Tensor) -> float:
    """Half of the 95 % interval of the mean over runs."""
    return float(1.96 * runs.std() / len(runs) ** 0.5)


@todist.rank_zero_only
def train(args: argparse.Namespace, write: todist.WriteScalars) -> None:
    histories, learned = {}, {}
    print("| game | learner | paper: learned, % | here | paper: payoff a round (deviation) | here |")
    print("|---|---|---|---|---|---|")
    for game in GAMES:
        generator = torch.Generator().manual_seed(args.seed)
        players = Players(*torch.randn(2, args.pairs, 5, generator=generator, dtype=torch.float64))
        for learner in LEARNERS:
            history, policies = learn(players, game, learner, args)
            histories[game, learner] = history[..., 0]
            learned[game, learner] = policies[:, 0]
            payoff = history[:, -1, 0]
            percent = 100 * ((policies - GAMES[game].should).abs() < NEAR).double().mean(dim=(1, 2))
            its_percent, its_payoff = PAPER.get((game, learner), ("", ""))
            print(
                f"| {game} | {learner} | {its_percent} | {percent.mean():.1f} ± {interval(percent):.1f}"
                f" | {its_payoff} | {payoff.mean():z.2f} ± {interval(payoff):.2f} ({payoff.std():.2f}) |",
                flush=True,
            )
            for step, mean in enumerate(history.mean(dim=(0, 2)).tolist()):
                write(step, {f"payoff a round/{game}, {learner}": mean})
    draw(histories, learned, args.output)


def draw(
    histories: dict[tuple[str, str], Tensor], learned: dict[tuple[str, str], Tensor], output: Path
) -> None:
    figure = Figure(figsize=(11, 6.4), layout="constrained")
    rows = figure.subplots(2, 2, width_ratios=[1.4, 1])
    for (curves, policies), game in zip(rows, GAMES, strict=True):
        for index, learner in enumerate(("naive", "LOLA")):
            colour = ("C1", "C0")[index]
            history = histories[game, learner][:40]
            curves.plot(history.T.numpy(), colour, alpha=0.15)
            curves.plot(histories[game, learner].mean(dim=0).numpy(), colour, linewidth=3, label=learner)
            middle, low, high = (learned[game, learner].quantile(part, dim=0) for part in (0.5, 0.25, 0.75))
            places = torch.arange(5) + (-0.15, 0.15)[index]
            errors = torch.stack([middle - low, high - middle]).numpy()
            policies.errorbar(places, middle, errors, fmt="o", color=colour, capsize=3)
        for place, probability in enumerate(GAMES[game].should.tolist()):
            policies.plot([place - 0.35, place + 0.35], 2 * [probability], "0.4", linewidth=1)
        curves.set(xlabel="steps", ylabel="payoff a round", title=f"{game}: runs, and their mean")
        curves.legend()
        policies.set(title="learned: median and quartiles", ylim=(-0.05, 1.05))
        heads = ["at first", *(("CC", "CD", "DC", "DD") if game == "dilemma" else ("HH", "HT", "TH", "TT"))]
        policies.set_xticks(range(5), heads)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=100)
    print(f"picture: {output}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Learning with opponent-learning awareness.")
    parser.add_argument("--pairs", type=int, default=400, help="of players (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="of both players (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=1.0, help="of either player (default: %(default)s)")
    parser.add_argument("--look-ahead", type=float, default=2.0, help="rate of the other's step (default: 2)")
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
