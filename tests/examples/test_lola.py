"""LOLA's players on one worker and on two: tit for tat and the Nash equilibrium, by a right gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.examples.running import imported, run_python, table
from tests.processes import torchrun

EXAMPLE = Path(__file__).parents[2] / "examples" / "lola.py"


def test_two_steps_are_alike_on_one_and_two_workers(tmp_path: Path) -> None:
    words = (EXAMPLE, "--pairs", 3, "--steps", 2, "--output")
    one = table(run_python(*words, tmp_path / "one.png"))
    assert one == table(torchrun("--standalone", "--nproc_per_node=2", *words, tmp_path / "two.png"))
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.nightly
def test_lola_cooperates_and_finds_the_equilibrium_alike_on_one_and_two_workers(tmp_path: Path) -> None:
    words = (EXAMPLE, "--pairs", 12, "--steps", 80, "--output")
    one = table(run_python(*words, tmp_path / "one.png"))
    two = table(torchrun("--standalone", "--nproc_per_node=2", *words, tmp_path / "two.png"))
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")
    assert one == two
    rows = {(row[0], row[1]): row for row in one[1:]}
    percent = {key: float(row[3].split()[0]) for key, row in rows.items()}
    payoff = {key: float(row[5].split()[0]) for key, row in rows.items()}
    assert payoff["dilemma", "naive"] < -1.8
    assert payoff["dilemma", "foresees"] < -1.6
    for learner in ("LOLA", "LOLA, expanded"):
        assert payoff["dilemma", learner] > -1.3
        assert percent["dilemma", learner] > percent["dilemma", "naive"] + 20
        assert percent["pennies", learner] > 75 > 10 > percent["pennies", "naive"]


def test_the_payoff_is_the_discounted_sum_of_the_rounds() -> None:
    lola = imported(EXAMPLE)
    players = lola.Players(*torch.randn(2, 5, generator=torch.Generator().manual_seed(1)).double())
    p, q = (player.sigmoid() for player in players)
    for game in lola.GAMES.values():
        visits = torch.outer(torch.stack([p[0], 1 - p[0]]), torch.stack([q[0], 1 - q[0]])).flatten()
        total = torch.zeros(2, dtype=torch.float64)
        for round in range(800):
            total += game.discount**round * visits @ game.payoffs
            moves = torch.zeros(4, dtype=torch.float64)
            for state, (mine, its) in enumerate(((1, 1), (2, 3), (3, 2), (4, 4))):  # CC, CD, DC, DD
                a, b = p[mine], q[its]
                moves += visits[state] * torch.stack([a * b, a * (1 - b), (1 - a) * b, (1 - a) * (1 - b)])
            visits = moves
        torch.testing.assert_close(lola.values(players, game), total)


@pytest.mark.parametrize("me", [0, 1])
def test_the_gradient_goes_through_the_other_player_s_step(me: int) -> None:
    lola = imported(EXAMPLE)
    generator = torch.Generator().manual_seed(0)
    policies = torch.randn(2, 5, generator=generator, dtype=torch.float64)
    direction = torch.randn(5, generator=generator, dtype=torch.float64)
    game = lola.GAMES["dilemma"]

    def payoffs(own: Tensor, other: Tensor) -> Tensor:
        players = lola.Players(own, other) if me == 0 else lola.Players(other, own)
        return lola.values(players, game)[[me, 1 - me]]

    def its_step(own: Tensor) -> Tensor:
        other = policies[1 - me].clone().requires_grad_()
        (step,) = torch.autograd.grad(payoffs(own, other)[1], other)
        return policies[1 - me] + 0.7 * step

    def slope(after: Callable[[Tensor], Tensor]) -> float:
        ahead, behind = (policies[me] + shift * direction for shift in (1e-5, -1e-5))
        return float(payoffs(ahead, after(ahead))[0] - payoffs(behind, after(behind))[0]) / 2e-5

    fixed = its_step(policies[me])
    afters = {"naive": lambda own: policies[1 - me], "foresees": lambda own: fixed, "LOLA": its_step}
    slopes = {learner: slope(after) for learner, after in afters.items()}
    for learner, expected in slopes.items():
        ascent = torch.vmap(partial(lola.ascent, me=me, game=game, learner=learner, look_ahead=0.7))
        gradient = ascent(lola.Players(*policies[:, None]))[0]
        assert math.isclose(float(gradient @ direction), expected, rel_tol=1e-6), learner
    assert not math.isclose(slopes["LOLA"], slopes["foresees"], rel_tol=1e-2)

    # The paper's rule: the step times the payoff's slope there, which is constant.
    other = policies[1 - me].clone().requires_grad_()
    (payoff_s_slope,) = torch.autograd.grad(payoffs(policies[me], other)[0], other)
    ahead, behind = (its_step(policies[me] + shift * direction) @ payoff_s_slope for shift in (1e-5, -1e-5))
    expected = slopes["naive"] + float(ahead - behind) / 2e-5
    ascent = torch.vmap(partial(lola.ascent, me=me, game=game, learner="LOLA, expanded", look_ahead=0.7))
    gradient = ascent(lola.Players(*policies[:, None]))[0]
    assert math.isclose(float(gradient @ direction), expected, rel_tol=1e-6)
    assert not math.isclose(expected, slopes["LOLA"], rel_tol=1e-2)
