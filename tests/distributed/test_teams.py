"""A call on teams gives what the call in one process gives, and ends with an error where one member fails."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchopt_dist as todist
from tests.distributed import team_cases as cases
from tests.rows import each_row


@cache
def on_four() -> dict[str, Any]:
    made = todist.launch(cases.on_four, nproc_per_host=4, backend="gloo", rpc=True, on_loss="continue")
    return made.rank(0)


@each_row("size", [2, 4])
@each_row("name", cases.FUNCTIONS)
def test_a_team_gives_what_one_process_gives(name, size):
    expected = cases.numbers(cases.alone(cases.FUNCTIONS[name]), second=name != "own")
    for one, other in zip(expected, on_four()[f"{name} {size}"], strict=True):
        torch.testing.assert_close(other, one, rtol=1e-10, atol=1e-12)


def test_tasks_go_to_teams():
    found = on_four()
    assert found["map"] == [(2, 0, 6.0), (2, 0, 3.0), (2, 1, 4.0)]
    assert found["batch"] == [(2, 0, 3.0), (2, 1, 2.0)]
    assert found["rank"] == found["put"] == [(2, 1, 28.0)]
    assert found["mesh"] == [(2, 0, 6.0), (2, 1, 22.0)]
    assert [size for size, *_ in found["alone"]] == [1, 1]


def test_a_task_draws_the_same_on_a_team():
    found = on_four()
    torch.testing.assert_close(found["drawn"], found["drawn plainly"], rtol=0, atol=0)
    assert found["drawn"].unique().numel() == 3


def test_calls_at_once_take_turns():
    value, grad = on_four()["at once"]
    one = 4 * torch.arange(8.0).square().mean() * sum(number**2 for number in range(5))
    torch.testing.assert_close([value, grad], [one, one])


MESSAGES = {
    "raise 1": "KeyError: 'on one member'",
    "raise 2": "KeyError: 'on one member'",
    "differ 0": "ValueError: all members of a team must return the same value, got another value in value on rank ",
    "return 3": "another member has returned, and takes part in no more collectives",
    " 0": "70",
    "backward": "KeyError: 'in backward'",
    "in itself": "RuntimeError: a function that a team runs must not call with `team`",
    "module": "TypeError: a function that a team runs must return tensors, numbers or trees of these, got Linear",
    "three": "ValueError: `team` must divide the number of workers, which is 4, got 3",
    "die": "WorkerLostError: rank 3 died",
    "then": "[(2, 0, 28.0)]",
}


@each_row("name", MESSAGES)
def test_an_error_of_a_member_is_one_of_the_call(name):
    assert MESSAGES[name] in on_four()[name]


def test_a_team_goes_on_after_an_error():
    assert on_four()["after"] == 70


@each_row(
    ("options", "error"),
    [
        ({"retries": 1}, "`retries` must be left out with `team`, got retries=1"),
        ({"hedge_after": 1.0}, "`hedge_after` must be left out"),
        ({"vectorize": True}, "`vectorize` must be left out"),
        ({"compile": True}, "`compile` must be left out"),
        ({"isolate_own_share": False}, "`isolate_own_share` must be left out"),
        ({"progress": True}, "`progress` must be left out"),
        ({"fan_out": 2}, "`fan_out` must be left out"),
        ({"buffers": "mean"}, "`buffers` must be left out"),
        ({"partitioner": todist.dim_partitioner(0, balance=todist.Balance())}, "`balance` must be left out"),
        ({"team": 0}, "`team` must be at least 1, got 0"),
    ],
)
def test_what_does_not_go_with_teams(options, error):
    with pytest.raises(ValueError, match=error):
        todist.parallelize(**{"team": 2, **options})


@each_row("team", [True, "2", 2.0])
def test_a_team_is_a_number(team):
    with pytest.raises(TypeError, match="`team` must be a number of workers or a DeviceMesh, got"):
        todist.parallelize(team=team)


def test_a_team_needs_a_process_group(workers, monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    workers(4)
    with pytest.raises(RuntimeError, match="`team` needs a process group of all workers: use"):
        todist.remote_sync_call(len, args=(torch.ones(4),), team=2)


def test_elsewhere_there_is_a_team_of_one():
    assert todist.team() == todist.typing.Team(rank=0, size=1, group=None)
    x = torch.tensor(2.0, requires_grad=True)
    (grad,) = torch.autograd.grad(todist.mean_over(todist.vary_over(x**2, todist.team()), todist.team()), x)
    assert grad == 4


@todist.auto_init_rpc()
def in_one_process():
    spread = todist.parallelize(todist.tasks, todist.mean_reducer, team=4)
    return spread(cases.scaled)(todist.replicated(torch.tensor(2.0)), torch.arange(8.0).reshape(2, 4))


def test_a_world_of_one_process_has_teams_of_one():
    assert in_one_process() == 70
