"""Two players who learn to cooperate, each by a gradient through the other's learning: the table of the LOLA paper.

    python examples/lola.py
    torchrun --nproc_per_node=2 examples/lola.py

Learning with Opponent-Learning Awareness (LOLA, Foerster et al., 2018, https://arxiv.org/abs/1709.04326) follows the
gradient of a player's payoff *after the opponent's next learning step*. That step is an inner loop of one step, and the
adjoint says who learns: with ``Recorded`` the gradient goes through the step, which is LOLA; with ``FirstOrder`` the
step is foreseen, but its derivative is left out. A naive learner foresees nothing. The paper expands the payoff to
first order in the step, with a slope that is held constant: ``LOLA, expanded``. A policy is five probabilities: to
cooperate (or show heads) in the first round, and after each outcome of the round before. The payoff of the infinite
game is exact, from one linear system of four equations.

Claim, with exact payoffs (Table 3): in the iterated prisoner's dilemma naive learners defect, and LOLA plays tit for
tat; in iterated matching pennies LOLA finds the Nash equilibrium, heads half of the time, and naive learners do not.
Here a state counts as learned if its probability is within 0.02 of that; with this guess naive learners have the
paper's percentage. A run is a pair of players. A learner's runs are computed at once, and learners spread over workers.

Result: naive learners get -1.99 a round and play 21 % tit for tat, LOLA as in the paper gets -1.04 and plays 76 %; of
the pennies they learn 0 % and 96 %. The step without its derivative is enough there, and not for the dilemma.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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
LEARNERS = {
    "naive": None,
    "foresees": todist.FirstOrder(),
    "LOLA": todist.Recorded(),
    "LOLA, expanded": todist.Recorded(),
}
"""How each takes the gradient through the other's step, if at all."""
PAPER = {
    ("dilemma", "naive"): ("20.8", "-1.98 (0.14)"),
    ("dilemma", "LOLA, expanded"): ("81.0", "-1.06 (0.19)"),
    ("pennies", "naive"): ("0.0 †", "0 (0.37)"),
    ("pennies", "LOLA, expanded"): ("98.8 †", "0 (0.02)"),
}
"""Its Table 3, exact: percentage; mean and standard deviation of the payoff a round. † is not checked."""


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
        if adjoint is None:
            return payoff(own, other, me)
        step = partial(payoff, own, whose=1 - me)
        stepped = todist.inner_loop(step, optimizer, other, 1, adjoint=adjoint).params
        if learner != "LOLA, expanded":
            return payoff(own, stepped, me)
        slope = grad(payoff, argnums=1)(own.detach(), other, me)
        return payoff(own, other, me) + slope @ (stepped - other)

    return grad(expected)(players[me])


def learn(cell: tuple[str, str], args: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """All runs at once → the first one's payoffs a round, (runs, steps), and both last policies, (runs, 2, 5)."""
    game, learner = GAMES[cell[0]], cell[1]
    generator = torch.Generator().manual_seed(args.seed)
    players = Players(*torch.randn(2, args.pairs, 5, generator=generator, dtype=torch.float64))
    settings: dict[str, Any] = {"game": game, "learner": learner, "look_ahead": args.look_ahead}
    history = []
    for _ in range(args.steps):
        history.append((1 - game.discount) * torch.vmap(partial(values, game=game))(players)[:, 0])
        ascents = [torch.vmap(partial(ascent, me=me, **settings))(players) for me in (0, 1)]
        players = Players(*(own + args.lr * up for own, up in zip(players, ascents, strict=True)))
    return torch.stack(history, dim=1), torch.stack(players, dim=1).sigmoid()


def interval(runs: Tensor) -> float:
    """Half of the 95 % interval of the mean over runs."""
    return float(1.96 * runs.std() / len(runs) ** 0.5)


@todist.rank_zero_only
def train(args: argparse.Namespace, write: todist.typing.WriteScalars) -> None:
    histories, learned = {}, {}
    print("| game | learner | paper: learned, % | here | paper: payoff a round (deviation) | here |")
    print("|---|---|---|---|---|---|")
    cells = [(game, learner) for game in GAMES for learner in LEARNERS]
    for cell, (history, policies) in zip(cells, todist.map(learn, cells, args=(args,)), strict=True):
        histories[cell], learned[cell] = history, policies[:, 0]
        payoff = history[:, -1]
        percent = 100 * ((policies - GAMES[cell[0]].should).abs() < NEAR).double().mean(dim=(1, 2))
        its_percent, its_payoff = PAPER.get(cell, ("", ""))
        print(
            f"| {cell[0]} | {cell[1]} | {its_percent} | {percent.mean():.1f} ± {interval(percent):.1f}"
            f" | {its_payoff} | {payoff.mean():z.2f} ± {interval(payoff):.2f} ({payoff.std():.2f}) |"
        )
        for step, mean in enumerate(history.mean(dim=0).tolist()):
            write(step, {f"payoff a round/{cell[0]}, {cell[1]}": mean})
    draw(histories, learned, args.output)


def draw(histories: dict[Any, Tensor], learned: dict[Any, Tensor], output: Path) -> None:
    figure = Figure(figsize=(11, 6.4), layout="constrained")
    rows = figure.subplots(2, 2, width_ratios=[1.4, 1])
    for (curves, policies), game in zip(rows, GAMES, strict=True):
        for learner, colour, shift in (("naive", "C1", -0.15), ("LOLA", "C0", 0.15)):
            history = histories[game, learner][:40]
            curves.plot(history.T.numpy(), colour, alpha=0.15)
            curves.plot(histories[game, learner].mean(dim=0).numpy(), colour, linewidth=3, label=learner)
            middle, low, high = (learned[game, learner].quantile(part, dim=0) for part in (0.5, 0.25, 0.75))
            errors = torch.stack([middle - low, high - middle]).numpy()
            policies.errorbar(torch.arange(5) + shift, middle, errors, fmt=f"{colour}o", capsize=3)
        for place, probability in enumerate(GAMES[game].should.tolist()):
            policies.plot([place - 0.35, place + 0.35], 2 * [probability], "0.4", linewidth=1)
        curves.set(xlabel="steps", ylabel="payoff a round", title=f"{game}: runs, and their mean")
        curves.legend(loc="upper right")
        policies.set(title="learned: median and quartiles", ylim=(-0.05, 1.05))
        heads = ["at first", *(("CC", "CD", "DC", "DD") if game == "dilemma" else ("HH", "HT", "TH", "TT"))]
        policies.set_xticks(range(5), heads)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=100)
    print(f"picture: {output}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Learning with opponent-learning awareness.")
    parser.add_argument("--pairs", type=int, default=3000, help="of players (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="of both players (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=1.0, help="of either player (default: %(default)s)")
    parser.add_argument("--look-ahead", type=float, default=1.0, help="rate of the other's step (default: 1)")
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
