"""Faster workers get more tasks; results stay in order, and gradients are those of even shares."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchopt_dist as todist
from tests.distributed.programs import gradients, mlp
from tests.rows import each_row
from torchopt_dist.distributed.balance import ranges, taking_readings
from torchopt_dist.distributed.worker import execute


def longest(shares, seconds):
    return max(count * each for count, each in zip(shares, seconds, strict=True))


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 12), st.lists(st.sampled_from([0.5, 1.0, 1.7, 3.0, 20.0]), min_size=1, max_size=4))
def test_no_other_shares_have_a_shorter_longest_one(tasks, seconds):
    found = todist.Balance(dict(enumerate(seconds))).shares(tasks, range(len(seconds)))
    assert sum(found) == tasks
    if tasks < len(seconds):
        assert sorted(found) == [0] * (len(seconds) - tasks) + [1] * tasks
        return
    assert min(found) >= 1
    others = itertools.product(range(1, tasks + 1), repeat=len(seconds))
    best = min(longest(shares, seconds) for shares in others if sum(shares) == tasks)
    assert longest(found, seconds) == pytest.approx(best)


def test_many_tasks_are_as_many_as_fit_the_speeds():
    found = todist.Balance({0: 1e-3, 1: 2e-3, 3: 6e-3}).shares(1_000_000, (0, 1, 3))
    assert found == [600_000, 300_000, 100_000]


def test_tasks_move_when_that_pays_and_readings_are_averaged():
    balance = todist.Balance()
    took = taking_readings(todist.dim_partitioner(0, balance=balance))
    assert balance.shares(10, (0, 1)) == [5, 5]
    for worker, seconds in ((0, 1.0), (1, 4.0), (1, 0.0)):  # the last is no reading
        took(worker, seconds)
    assert balance.seconds == {0: 1, 1: 4}
    assert balance.shares(10, (0, 1)) == [8, 2]
    took(1, 4.4)
    assert balance.seconds[1] == pytest.approx(4.2)
    assert balance.shares(10, (0, 1)) == [8, 2], "the longest share would be 8.4 s instead of 9 s"
    for _ in range(20):
        took(1, 1.0)
    assert balance.shares(10, (0, 1)) == [5, 5]
    assert balance.shares(10, (0, 1, 2)) == [4, 3, 3], "a new worker is taken for an average one"
    fixed = todist.Balance({0: 1, 1: 3}, fixed=True)
    assert taking_readings(todist.dim_partitioner(0, balance=fixed)) is None
    assert fixed.shares(8, (0, 1)) == [6, 2]
    assert repr(fixed) == "Balance({0: 1, 1: 3}, fixed=True)"


def test_parts_are_in_order_and_none_is_empty():
    balance = todist.Balance({4: 1, 7: 3}, fixed=True)
    assert ranges(8, (7, 4), balance, exclusive=False) == [(7, 0, 2), (4, 2, 8)]
    assert ranges(3, (7, 4), balance) == [(7, 0, 1), (4, 1, 2), (4, 2, 3)]
    assert ranges(1, (7, 4), balance, exclusive=False) == [(7, 0, 1)]


@each_row(
    ("make", "error", "match"),
    [
        (lambda: todist.Balance({0: 0.0}), ValueError, "seconds must be positive, got 0.0 for rank 0"),
        (lambda: todist.Balance({0: float("nan")}), ValueError, "must be positive"),
        (lambda: todist.Balance({"worker0": 1.0}), TypeError, "the key 'worker0'"),
        (lambda: todist.Balance([1.0]), TypeError, "seconds must map ranks to numbers"),
        (lambda: todist.Balance(fixed=True), ValueError, "fixed=True needs the seconds"),
        (lambda: todist.Balance(fixed=1), TypeError, "fixed must be True or False"),
        (
            lambda: todist.dim_partitioner(0, balance=True),
            TypeError,
            r"balance must be a todist\.Balance\(\)",
        ),
        (lambda: todist.map(abs, [1], balance={0: 1.0}), TypeError, r"balance must be a todist\.Balance\(\)"),
        (
            lambda: todist.put(torch.ones(3), todist.dim_partitioner(0, balance=todist.Balance())),
            ValueError,
            "a balance moves them",
        ),
    ],
)
def test_what_is_no_balance_is_an_error(make, error, match):
    with pytest.raises(error, match=match):
        make()


class Clock:
    """In the place of `time`: on rank r a task takes r + 1 seconds."""

    now = 0.0

    def perf_counter(self):
        return self.now


clock = Clock()


def use_the_clock():
    execute.time = clock


def loss_of(model, x):
    """Of rows; each takes as long as the worker is slow."""
    clock.now += len(x) * (todist.get_rank() + 1)
    return model(x).square().sum(1).mean()


def row_of(x, model):
    return todist.get_rank(), loss_of(model, x[None])


def faster_workers_get_more(fan_out):
    """Twelve rows at 1, 2 and 3 s: in 7 s if the workers have 7, 3 and 2."""
    model, x = mlp(), torch.randn(12, 6, dtype=torch.float64)
    here = loss_of(model, x)
    expected = gradients(here, model)
    for plain in (False, True):
        balance = todist.Balance()
        call = todist.parallelize(
            todist.dim_partitioner(0, balance=balance),
            todist.mean_reducer,
            fan_out=fan_out,
            isolate_own_share=not plain,
        )(loss_of)
        for _ in range(2):
            there = call(model, x)
            torch.testing.assert_close(there, here)
            torch.testing.assert_close(gradients(there, model), expected)
            assert balance.seconds == {0: 1, 1: 2, 2: 3}
        assert [part.size for part in todist.dim_partitioner(0, balance=balance)(x)] == [7, 3, 2]
    balance = todist.Balance()
    for shares in ([4, 4, 4], [7, 3, 2]):
        found = todist.map(row_of, x, args=(model,), balance=balance, fan_out=fan_out)
        ranks, losses = zip(*found, strict=True)
        assert [ranks.count(rank) for rank in range(3)] == shares
        assert list(ranks) == sorted(ranks)
        torch.testing.assert_close(torch.stack(losses), model(x).square().sum(1))
        torch.testing.assert_close(gradients(torch.stack(losses).mean(), model), expected)


def a_handle_goes_where_its_task_goes():
    x = torch.arange(6.0)
    by_speed = todist.dim_partitioner(0, exclusive=True, keepdim=False, balance=todist.Balance())
    kept = todist.put(x, by_speed)
    double = todist.parallelize(by_speed, todist.stack_reducer)(_double)
    for seconds in (1.0, 5.0, 0.2):
        by_speed.balance.seconds[1] = seconds
        assert torch.equal(double(kept), 2 * x)


def _double(x):
    return 2 * x


def test_calls_over_and_over_give_faster_workers_more(world):
    def body():
        for worker in range(3):
            todist.remote_call(use_the_clock, worker)
        faster_workers_get_more(None)
        faster_workers_get_more(1)
        a_handle_goes_where_its_task_goes()

    world(3, env={"TODIST_TRANSPORT": "zmq"}).on_zero(body)
