"""Threads that draw random numbers at the same time draw what each of them draws alone, or are told of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torchopt_dist as todist
from tests.waits import wait_until
from torchopt_dist.core import random_turns
from torchopt_dist.core.random_turns import Turn, draw_seed, lent, visiting
from torchopt_dist.distributed.calls.futures import gather

SECONDS = 30.0
ADJOINTS = [todist.Replayed(snapshots=1), todist.Replayed(snapshots=1), todist.Recorded()]


def nothing() -> None:
    pass


def gradient(
    adjoint: Any = ADJOINTS[0],
    between: Callable[[], Any] = nothing,
    after: Callable[[], Any] = nothing,
    seed: int = 1,
) -> Tensor:
    """The result and gradient of a loop whose loss drops out twice; functions are called between and after them."""
    p = torch.ones(20, requires_grad=True)

    def loss(p: Tensor) -> Tensor:
        first = F.dropout(p**3)
        between()
        second = F.dropout(p)
        after()
        return (first * second).sum()

    made = todist.inner_loop(loss, todist.sgd(lr=0.01), p, 3, seed=seed, adjoint=adjoint).params
    (found,) = torch.autograd.grad(made.sum(), p)
    return torch.stack([made.detach(), found])


def task(seed: int, *, exclusive: bool = True, asks: bool = False) -> Turn:
    return Turn(exclusive=exclusive, seed=seed, asks=asks)


def somebody_waits() -> bool:
    return random_turns._crowd > 0


@pytest.mark.parametrize("adjoint", ADJOINTS)
def test_a_thread_that_comes_in_the_middle_of_a_step_waits_for_its_end(adjoint):
    here, done = threading.Event(), threading.Event()

    def first() -> None:
        here.set()
        if not done.is_set():
            wait_until(somebody_waits)

    def second() -> None:
        assert done.wait(SECONDS)

    with ThreadPoolExecutor() as pool:
        one = pool.submit(gradient, adjoint, first, done.set, 1)
        assert here.wait(SECONDS)
        two = pool.submit(gradient, adjoint, second, nothing, 2)
        found = [one.result(SECONDS), two.result(SECONDS)]
    assert torch.equal(found[0], gradient(adjoint, seed=1))
    assert torch.equal(found[1], gradient(adjoint, seed=2))


def test_a_thread_that_waits_for_another_gives_its_turn_away():
    def ask() -> None:
        with ThreadPoolExecutor() as pool:
            asked: Future[Any] = pool.submit(lambda: [gradient(seed=2)])
            (found,) = gather({0: asked}, ["worker0"])[0]
        assert torch.equal(found, expected)

    expected = gradient(seed=2)
    assert torch.equal(gradient(between=ask), gradient())


def loop(loss: Callable[[Tensor], Tensor]) -> Tensor:
    p = torch.ones(3, requires_grad=True)
    made: Tensor = todist.inner_loop(loss, todist.sgd(lr=0.1), p, 3, seed=1).params
    return made


def test_threads_of_a_loss_end_whatever_they_wait_for_and_are_told(limits):
    limits(short_patience=0.02)

    def loss(p: Tensor) -> Tensor:
        with ThreadPoolExecutor() as pool:
            within = pool.submit(loop, torch.sum).result(SECONDS)
        return (p * within).sum()

    with pytest.warns(UserWarning, match="has waited for its turn to draw random numbers"):
        found = loop(loss)
    assert torch.equal(found, loop(lambda p: (p * loop(torch.sum)).sum()))


def drawn(seed: int, number: int) -> Tensor:
    """The first numbers of a seed."""
    with task(seed):
        return torch.rand(number)


@pytest.mark.parametrize("kinds", [(True, True), (True, False), (False, True)])
def test_an_exclusive_task_and_another_one_compute_one_after_the_other_and_draw_what_each_draws_alone(kinds):
    """Each draws, waits for a while so that the other one may compute, and draws again."""
    alone = drawn(1, 4), drawn(2, 4)
    computing: list[int] = []

    def draw(numbers: list[Tensor], seed: int) -> None:
        computing.append(seed)
        for _ in range(2):
            time.sleep(0.01)
            numbers.append(torch.rand(1))
            assert computing == [seed]
        computing.remove(seed)

    def run(seed: int, *, exclusive: bool, there: threading.Event) -> Tensor:
        numbers: list[Tensor] = []
        with task(seed, exclusive=exclusive):
            there.set()
            draw(numbers, seed)
            with lent():
                time.sleep(0.015)
            draw(numbers, seed)
        return torch.cat(numbers)

    torch.manual_seed(7)
    state = torch.get_rng_state()
    with ThreadPoolExecutor() as pool:
        for _ in range(5):
            there = threading.Event()
            first = pool.submit(run, 1, exclusive=kinds[0], there=there)
            assert there.wait(SECONDS)
            second = pool.submit(run, 2, exclusive=kinds[1], there=threading.Event())
            for future, expected in zip((first, second), alone, strict=True):
                assert torch.equal(future.result(SECONDS), expected)
    assert torch.equal(torch.get_rng_state(), state)
    assert not random_turns._inside


def test_exclusive_tasks_of_many_threads_draw_what_each_draws_alone():
    def run(seed: int) -> Tensor:
        with task(seed):
            first = torch.rand(2)
            time.sleep(0.01)
            with lent():
                time.sleep(0.001)
            return torch.cat([first, torch.rand(2)])

    with ThreadPoolExecutor() as pool:
        found = [*pool.map(run, range(4))]
    assert all(torch.equal(numbers, drawn(seed, 4)) for seed, numbers in enumerate(found))


def test_shared_tasks_compute_at_the_same_time():
    met = threading.Barrier(2)

    def run(seed: int) -> None:
        with task(seed, exclusive=False):
            met.wait(SECONDS)

    with ThreadPoolExecutor() as pool:
        list(pool.map(run, range(2)))


def test_a_step_does_not_wait_for_a_task_that_need_not_be_alone():
    """Such as one that serves for as long as the program runs."""
    with ThreadPoolExecutor() as pool, task(1, exclusive=False):
        found = pool.submit(loop, torch.sum).result(SECONDS)
    assert torch.equal(found, loop(torch.sum))


@pytest.mark.parametrize("exclusive", [False, True])
def test_what_a_task_computes_within_itself_is_as_exclusive_as_it_is(exclusive):
    entered = threading.Event()

    def other() -> Tensor:
        entered.set()
        with task(2, exclusive=False):
            return torch.rand(2)

    with ThreadPoolExecutor() as pool, task(1):
        first = torch.rand(2)
        with task(3, exclusive=exclusive):  # its own share of a call that it makes
            future = pool.submit(other)
            assert entered.wait(SECONDS)
            wait_until(somebody_waits)
            own = torch.rand(1)
            with lent():
                found = future.result(SECONDS)
            own = torch.cat([own, torch.rand(1)])
        found_alone = torch.cat([first, torch.rand(2)])
    assert torch.equal(found, drawn(2, 2))
    assert torch.equal(own, drawn(3, 2))
    assert torch.equal(found_alone, drawn(1, 4))


def test_exclusive_tasks_within_shared_ones_of_two_threads_end():
    """Each is in a task of its own that lets the other one's compute meanwhile."""
    met = threading.Barrier(2)

    def run(seed: int) -> Tensor:
        with task(seed, exclusive=False):
            met.wait(SECONDS)
            with task(seed + 10):
                return torch.rand(3)

    with ThreadPoolExecutor() as pool:
        found = [*pool.map(run, range(2))]
    assert all(torch.equal(numbers, drawn(seed + 10, 3)) for seed, numbers in enumerate(found))


def test_a_visitor_computes_only_while_a_thread_waits_for_a_call_and_that_waits_for_it():
    there, may_end, has_ended = (threading.Event() for _ in range(3))

    def visitor() -> None:
        with visiting(), task(1):
            there.set()
            assert may_end.wait(SECONDS)
        has_ended.set()

    def caller() -> None:
        with lent():
            assert there.wait(SECONDS)
        assert has_ended.is_set()

    with ThreadPoolExecutor() as pool:
        running = pool.submit(visitor)
        wait_until(somebody_waits)
        assert not there.is_set()
        calling = pool.submit(caller)
        assert there.wait(SECONDS)
        time.sleep(0.01)
        assert not calling.done()
        may_end.set()
        running.result(SECONDS)
        calling.result(SECONDS)


@pytest.mark.parametrize("computes", [False, True])
def test_an_exclusive_task_waits_for_one_that_computes_and_not_for_one_that_waits_unseen(computes, limits):
    limits(short_patience=0.2)
    limits(quiet=0.02)

    def run() -> None:
        with task(1):
            pass

    with ThreadPoolExecutor() as pool, task(2, exclusive=False):
        begun = pool.submit(run)
        if not computes:
            with pytest.warns(UserWarning, match="has waited for its turn"):
                begun.result(SECONDS)  # a wait that nobody knows of
            run_again = pool.submit(run)
            run_again.result(SECONDS)  # and the next one does not wait for this one
            return
        wait_until(somebody_waits)
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            sum(range(1000))
        assert not begun.done()


def test_seeds_that_are_drawn_while_others_compute_are_those_that_are_drawn_alone():
    torch.manual_seed(3)
    expected = [draw_seed() for _ in range(2)]
    there, may_end = threading.Event(), threading.Event()

    def run() -> Tensor:
        with task(1):
            first = torch.rand(2)
            there.set()
            assert may_end.wait(SECONDS)
            return torch.cat([first, torch.rand(2)])

    torch.manual_seed(3)
    with ThreadPoolExecutor() as pool:
        running = pool.submit(run)
        assert there.wait(SECONDS)
        found = [draw_seed()]
        may_end.set()
        assert torch.equal(running.result(SECONDS), drawn(1, 4))
    assert [*found, draw_seed()] == expected


@pytest.mark.parametrize("drawing", [None, "first", "second"])
def test_tasks_that_overlap_in_two_threads_know_whether_anything_was_drawn(drawing):
    """Whether an evaluation moves the caller's random numbers must not depend on what else its workers compute."""
    turns = {name: task(seed, exclusive=False, asks=True) for seed, name in enumerate(("first", "second"))}
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        threads = {"first": first, "second": second}
        for name in turns:
            threads[name].submit(turns[name].__enter__).result(60)
        if drawing is not None:
            threads[drawing].submit(torch.rand, ()).result(60)
        for name in turns:
            threads[name].submit(turns[name].__exit__, None, None, None).result(60)
    assert turns["first"].drew is turns["second"].drew is (drawing is not None)


@pytest.mark.parametrize("last", ["first", "second"])
def test_tasks_that_overlap_in_two_threads_leave_the_generators_as_they_were(last):
    """Such as the caller's own share, and what another share asks the caller's process for."""
    turns = {name: task(seed, exclusive=False) for seed, name in enumerate(("first", "second"))}
    before = torch.get_rng_state()
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        threads = {"first": first, "second": second}
        for name in turns:
            threads[name].submit(turns[name].__enter__).result(SECONDS)
            threads[name].submit(torch.rand, ()).result(SECONDS)
        for name in sorted(turns, key=last.__eq__):
            threads[name].submit(turns[name].__exit__, None, None, None).result(SECONDS)
    assert torch.equal(torch.get_rng_state(), before)
