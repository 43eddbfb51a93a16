"""Threads that draw random numbers at the same time draw what each of them draws alone, or are told of it."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torchopt_dist as todist
from torchopt_dist import _random_turns, _room
from torchopt_dist._random_turns import Draws, Task
from torchopt_dist.distributed._gather import gather

SECONDS = 30.0
ADJOINTS = [todist.Replayed(snapshots=1), todist.Replayed(snapshots=1, sweep="forward"), todist.Recorded()]


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


@pytest.mark.parametrize("adjoint", ADJOINTS)
def test_a_thread_that_comes_in_the_middle_of_a_step_waits_for_its_end(adjoint, monkeypatch):
    here, there, done = threading.Event(), threading.Event(), threading.Event()
    wait = _random_turns._ended.wait

    def seen(timeout: float) -> bool:
        there.set()
        return wait(timeout)

    monkeypatch.setattr(_random_turns._ended, "wait", seen)

    def first() -> None:
        here.set()
        assert there.wait(SECONDS)

    def second() -> None:
        there.set()
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


def loop(loss: Callable[[Tensor], Tensor], stop: Any = None) -> Tensor:
    p = torch.ones(3, requires_grad=True)
    made: Tensor = todist.inner_loop(loss, todist.sgd(lr=0.1), p, 3, seed=1, stop=stop).params
    return made


@pytest.mark.parametrize("late", [False, True])
def test_losses_that_draw_nothing_are_computed_at_the_same_time(late):
    met = threading.Barrier(2)

    def stop(number: int, loss: Tensor) -> bool:
        if not number:
            met.wait(SECONDS)  # both losses have been called once
        return False

    def run() -> Tensor:
        steps = iter(range(3))

        def loss(p: Tensor) -> Tensor:
            step = next(steps)
            if step:
                met.wait(SECONDS)  # both are in a step
            if late and step == 2:
                p = F.dropout(p)
                met.wait(SECONDS)
            return p.square().sum()

        return loop(loss, stop)

    with ThreadPoolExecutor() as pool:
        runs = [pool.submit(run) for _ in range(2)]
        errors = [run.exception(SECONDS) for run in runs]
    if late:
        assert any(isinstance(error, RuntimeError) and "must not draw" in str(error) for error in errors)
    else:
        assert torch.equal(runs[0].result(), loop(lambda p: p.square().sum()))


@pytest.mark.parametrize("draws", [False, True])
def test_threads_of_a_loss_end_whatever_they_wait_for(draws, monkeypatch):
    for name in ("PATIENCE", "SHORT_PATIENCE"):
        monkeypatch.setattr(_random_turns, name, 0.02)

    def loss(p: Tensor) -> Tensor:
        with ThreadPoolExecutor() as pool:
            within = pool.submit(loop, lambda q: (F.dropout(q) if draws else q).sum()).result(SECONDS)
        return (p * within).sum()

    if draws:
        with pytest.raises(RuntimeError, match="must not draw random numbers in two threads"):
            loop(loss)
    else:
        assert torch.equal(loop(loss), loop(lambda p: (p * loop(torch.sum)).sum()))


@pytest.mark.parametrize("waits", [False, True])
def test_tasks_of_two_threads_that_draw_are_told(waits):
    def other() -> Tensor:
        with _random_turns.Task(2):
            return torch.rand(3)

    def both() -> list[Tensor]:
        with ThreadPoolExecutor() as pool, _random_turns.Task(1):
            first = torch.rand(3)
            with _random_turns.lent() if waits else nullcontext():
                pool.submit(other).result(SECONDS)
            return [first, torch.rand(3)]

    if not waits:
        with pytest.warns(UserWarning, match="tasks drew random numbers in several threads"):
            both()
        return
    with _random_turns.Task(1):
        expected = torch.rand(6)
    assert torch.equal(torch.cat(both()), expected)


def drawn(seed: int, number: int) -> Tensor:
    """The first numbers of a seed."""
    with _random_turns.Task(seed):
        return torch.rand(number)


def wait_until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.001)


@pytest.mark.parametrize("guest_first", [False, True])
def test_a_guest_and_a_task_compute_one_after_the_other_and_draw_what_each_draws_alone(guest_first):
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

    def task(seed: int, *, guest: bool, there: threading.Event) -> Tensor:
        numbers: list[Tensor] = []
        with _random_turns.Task(seed, guest=guest):
            there.set()
            draw(numbers, seed)
            with _random_turns.lent():
                time.sleep(0.015)
            draw(numbers, seed)
        return torch.cat(numbers)

    torch.manual_seed(7)
    state = torch.get_rng_state()
    with ThreadPoolExecutor() as pool:
        for _ in range(5):
            there = threading.Event()
            first = pool.submit(task, 1, guest=guest_first, there=there)
            assert there.wait(SECONDS)
            second = pool.submit(task, 2, guest=not guest_first, there=threading.Event())
            for future, expected in zip((first, second), alone, strict=True):
                assert torch.equal(future.result(SECONDS), expected)
    assert torch.equal(torch.get_rng_state(), state)
    assert _random_turns._room.guest is None
    assert not _random_turns._tasks


def test_two_guests_compute_one_after_the_other():
    def task(seed: int) -> Tensor:
        with _random_turns.Task(seed, guest=True):
            first = torch.rand(2)
            time.sleep(0.01)
            with _random_turns.lent():
                time.sleep(0.001)
            return torch.cat([first, torch.rand(2)])

    with ThreadPoolExecutor() as pool:
        found = [*pool.map(task, range(4))]
    assert all(torch.equal(numbers, drawn(seed, 4)) for seed, numbers in enumerate(found))


def test_what_a_guest_computes_within_itself_is_a_guest_too():
    entered = threading.Event()

    def other() -> Tensor:
        entered.set()
        with _random_turns.Task(2):
            return torch.rand(2)

    with ThreadPoolExecutor() as pool, _random_turns.Task(1, guest=True):
        first = torch.rand(2)
        with _random_turns.Task(3):  # its own share of a call that it makes
            future = pool.submit(other)
            assert entered.wait(SECONDS)
            time.sleep(0.01)
            assert not future.done()
            own = torch.rand(1)
            with _random_turns.lent():
                found = future.result(SECONDS)
            own = torch.cat([own, torch.rand(1)])
        found_alone = torch.cat([first, torch.rand(2)])
    assert torch.equal(found, drawn(2, 2))
    assert torch.equal(own, drawn(3, 2))
    assert torch.equal(found_alone, drawn(1, 4))


def test_who_has_lent_its_process_goes_on_when_the_guest_waits():
    there, may_end = threading.Event(), threading.Event()

    def guest() -> None:
        with _random_turns.Task(1, guest=True):
            there.set()
            assert may_end.wait(SECONDS)

    with ThreadPoolExecutor() as pool:
        running = pool.submit(guest)
        assert there.wait(SECONDS)
        waiting = pool.submit(_random_turns.wait_for_guests)
        time.sleep(0.01)
        assert not waiting.done()
        may_end.set()
        waiting.result(SECONDS)
        running.result(SECONDS)


@pytest.mark.parametrize("computes", [False, True])
def test_a_guest_waits_for_a_task_that_computes_and_not_for_one_that_waits_unseen(computes, monkeypatch):
    monkeypatch.setattr(_room, "SHORT_PATIENCE", 0.2)
    monkeypatch.setattr(_room, "QUIET", 0.02)
    entered = threading.Event()

    def guest() -> float:
        entered.set()
        with _random_turns.Task(1, guest=True):
            return time.monotonic()

    with ThreadPoolExecutor() as pool, _random_turns.Task(2):
        begun = pool.submit(guest)
        assert entered.wait(SECONDS)
        if not computes:
            begun.result(SECONDS)  # a wait that nobody knows of
            return
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            sum(range(1000))
        assert not begun.done()


@pytest.mark.parametrize("drawing", [None, "first", "second"])
def test_tasks_that_overlap_in_two_threads_know_whether_anything_was_drawn(drawing):
    """Whether an evaluation moves the caller's random numbers must not depend on what else its workers compute."""
    draws = {"first": Draws(False), "second": Draws(False)}
    tasks = {name: Task(seed, draws=draws[name]) for seed, name in enumerate(draws)}
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        threads = {"first": first, "second": second}
        for name in tasks:
            threads[name].submit(tasks[name].__enter__).result(60)
        if drawing is not None:
            threads[drawing].submit(torch.rand, ()).result(60)
        for name in tasks:
            threads[name].submit(tasks[name].__exit__, None, None, None).result(60)
    assert draws["first"].known is draws["second"].known is (drawing is not None)
