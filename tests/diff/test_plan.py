"""What a replay keeps and how it comes back to each step, as a table of numbers: no step is run, no tensor is made."""

from __future__ import annotations

from math import comb

import pytest

from tests.diff.replays import fewest_advances
from torchopt_dist.diff.replay._plan import Plan, WayBack, places, split, steps_run_again


def gone_back(plan: Plan, steps: int) -> tuple[int, int, int]:
    """Go the way back with numbers in the place of tensors → how many runs and moves, how many starts at most."""
    way, kept, runs, moves = WayBack(plan, steps), {n for n in plan.starts if n < steps}, 0, 0
    most = len(kept)
    for number in reversed(range(steps)):
        here = None
        for do, at in way.to(number):
            if do == "drop":
                kept.remove(at)
            elif do == "keep":
                assert at == here
                assert at not in kept
                kept.add(at)
            elif do == "load":
                assert at in kept
                here = at
            else:
                assert at == here
                assert do == "run" or at < plan.gradients
                here += 1
                runs, moves = runs + (do == "run"), moves + (do == "move")
            most = max(most, len(kept))
        assert here == number
    assert not kept
    return runs, moves, most


TABLE = {
    "a snapshot": (
        Plan.of_snapshots(3, 1),
        ["load 0, run 0, run 1", "load 0, run 0", "load 0, drop 0"],
    ),
    "two": (
        Plan.of_snapshots(6, 2),
        [
            "load 3, run 3, run 4",
            "load 3, run 3",
            "load 3, drop 3",
            "load 0, run 0, keep 1, run 1",
            "load 1, drop 1",
            "load 0, drop 0",
        ],
    ),
    "all gradients": (
        Plan.of_all_gradients(6),
        [
            "load 3, move 3, keep 4, move 4",
            "load 4, drop 4",
            "load 3, drop 3",
            "load 0, move 0, keep 1, move 1",
            "load 1, drop 1",
            "load 0, drop 0",
        ],
    ),
    "two, and three gradients": (
        Plan.of_snapshots(7, 2, 4),
        [
            "load 5, run 5",
            "load 5, drop 5",
            "load 0, move 0, move 1, move 2, run 3",
            "load 0, move 0, move 1, keep 2, move 2",
            "load 2, drop 2",
            "load 0, move 0",
            "load 0, drop 0",
        ],
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_the_way_back(name):
    plan, expected = TABLE[name]
    steps = len(expected)
    way = WayBack(plan, steps)
    found = [", ".join(f"{do} {at}" for do, at in way.to(number)) for number in reversed(range(steps))]
    assert found == expected


def test_of_steps_that_nobody_asks_for_the_starts_are_dropped():
    way = WayBack(Plan.of_snapshots(6, 3), 6)
    assert way.to(2) == [("drop", 4), ("load", 1), ("run", 1)]
    assert way.to(0) == [("drop", 1), ("load", 0), ("drop", 0)]


@pytest.mark.parametrize("snapshots", [1, 2, 3, 5])
def test_snapshots_are_where_the_fewest_steps_are_run_again(snapshots):
    for steps in range(1, 40):
        assert steps_run_again(steps, snapshots) == fewest_advances(steps + 1, snapshots) - steps
        fewest = fewest_advances(steps, snapshots)
        if steps > 1 and snapshots > 1:
            ahead = split(steps, snapshots)
            assert fewest == ahead + fewest_advances(steps - ahead, snapshots - 1) + fewest_advances(
                ahead, snapshots
            )


@pytest.mark.parametrize("snapshots", [1, 2, 3, 5, 9])
def test_as_many_steps_are_run_again_as_the_formula_of_griewank_and_walther_says(snapshots):
    for steps in range(1, 60):
        runs, moves, most = gone_back(Plan.of_snapshots(steps, snapshots), steps)
        # Every step at most r times: of steps + 1, of which the outer loss is the last, r * steps - C(c + r, r - 1).
        r = next(r for r in range(steps + 1) if comb(snapshots + r, snapshots) >= steps + 1)
        least = r * (steps + 1) - (comb(snapshots + r, r - 1) if r else 0)
        assert runs == steps_run_again(steps, snapshots) == least - steps
        assert moves == 0
        assert most == len(places(steps, snapshots)) <= snapshots


def test_with_all_gradients_no_step_is_run_again_and_each_is_moved_by_once():
    for steps in range(1, 60):
        plan = Plan.of_all_gradients(steps)
        runs, moves, most = gone_back(plan, steps)
        assert (runs, moves) == (0, steps - len(plan.starts))
        assert most <= plan.snapshots


@pytest.mark.parametrize("ended", [1, 2, 5, 8])
@pytest.mark.parametrize(
    "plan", [Plan.of_all_gradients(9), Plan.of_snapshots(9, 3), Plan.of_snapshots(9, 2, 4)], ids=str
)
def test_a_loop_that_ended_early_is_gone_back_through(plan, ended):
    _runs, _moves, most = gone_back(plan, ended)
    assert most <= plan.snapshots


@pytest.mark.parametrize("memory", [2, 3, 4, 6, 7, 11, 23, 24, 40])
def test_a_budget_is_kept_and_shared_for_the_fewest_evaluations(memory):
    steps, snapshot, gradient = 9, 2, 1

    def evaluations(plan):
        """Of steps that are run again, and of those whose gradient is not kept."""
        return gone_back(plan, steps)[0] + steps - min(steps, plan.gradients + plan.last)

    plan = Plan.of_memory(steps, memory, snapshot, gradient)
    most = gone_back(plan, steps)[2]
    assert most <= plan.snapshots
    assert most * snapshot + min(steps, plan.gradients + plan.last) * gradient <= memory
    # More gradients than these would take many more moves.
    assert evaluations(plan) <= min(
        evaluations(Plan.of_snapshots(steps, snapshots, gradients))
        for snapshots in range(1, memory // snapshot + 1)
        for gradients in range(min(memory - snapshot * snapshots, 7) + 1)
    )
