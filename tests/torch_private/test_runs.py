"""What a run of torch's engine holds, and what is left of one that has failed; the private name is hidden here, too."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from torchopt_dist import torch_private as private


class _Thing:
    pass


class _Asks(torch.autograd.Function):
    """The identity; ``asks`` is called in its backward."""

    apply: ClassVar[Any]

    @staticmethod
    def forward(ctx: Any, x: Tensor, asks: Callable[[], None]) -> Tensor:
        ctx.asks = asks
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.asks()
        return grads[0], None


def _hide(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = torch.autograd.Variable._execution_engine
    hidden = SimpleNamespace(_execution_engine=SimpleNamespace(run_backward=engine.run_backward))
    monkeypatch.setattr(torch.autograd, "Variable", hidden)


@pytest.mark.parametrize("hide", [False, True])
def test_an_object_is_taken_back_once(monkeypatch: pytest.MonkeyPatch, hide: bool) -> None:
    if hide:
        _hide(monkeypatch)
    things: list[_Thing | None] = []

    def asks() -> None:
        take = private.held_by_run(_Thing)
        things.extend((take(), take()))

    _Asks.apply(torch.ones((), requires_grad=True), asks).backward()
    asks()  # outside of any backward
    assert [type(thing) for thing in things] == [_Thing, type(None)] * 2


@pytest.mark.parametrize("hide", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_a_run_holds_no_object_after_its_end(
    monkeypatch: pytest.MonkeyPatch, hide: bool, fails: bool
) -> None:
    if hide:
        _hide(monkeypatch)
    taken: list[Callable[[], _Thing | None]] = []
    there: list[bool] = []
    alive: list[weakref.ref[_Thing]] = []

    def make() -> _Thing:
        thing = _Thing()
        alive.append(weakref.ref(thing))
        return thing

    def late() -> None:
        there.append(alive[0]() is not None)
        if fails:
            raise ArithmeticError

    loss = _Asks.apply(torch.ones((), requires_grad=True), late)
    loss = _Asks.apply(loss, lambda: taken.append(private.held_by_run(make)))
    if fails:
        with pytest.raises(ArithmeticError):
            loss.backward()
    else:
        loss.backward()
    assert there == [True]
    assert (alive[0]() is None) is not hide
    assert (taken[0]() is None) is not hide


def _fails_early(held: bool) -> weakref.ref[_Thing]:
    """A backward that fails where another node is ready; what that node has."""
    leaf = torch.ones(3, requires_grad=True)
    thing = _Thing()

    def fail(thing: _Thing) -> None:
        raise ArithmeticError

    late = _Asks.apply(leaf, lambda: fail(thing))
    private.set_sequence_number(late, 0)
    early = _Asks.apply(leaf.sin(), lambda: fail(_Thing()))
    if held:
        early = _Asks.apply(early, lambda: private.held_by_run(_Thing))
    with pytest.raises(ArithmeticError):
        (late.sum() + early.sum()).backward()
    return weakref.ref(thing)


@pytest.mark.parametrize("hide", [False, True])
def test_a_run_that_fails_leaves_no_graph_where_one_of_its_nodes_held_an_object(
    monkeypatch: pytest.MonkeyPatch, hide: bool
) -> None:
    assert _fails_early(False)() is not None  # torch keeps it
    private.forget_failed_runs()
    if hide:
        _hide(monkeypatch)
    left = _fails_early(True)
    assert (left() is None) is not hide
    private.forget_failed_runs()
    assert left() is None


def test_failed_runs_are_forgotten_inside_of_another_run() -> None:
    left: list[bool] = []

    def asks() -> None:
        with torch.enable_grad():
            for held in (False, True):
                thing = _fails_early(held)
                private.forget_failed_runs()
                left.append(thing() is not None)

    leaf = torch.ones((), requires_grad=True)
    _Asks.apply(leaf * 2, asks).backward()
    assert left == [False, False]
    assert leaf.grad == 2


def test_an_object_that_another_thread_frees_is_none_of_its_own_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[Any] = []
    runs: list[object] = []
    engine = SimpleNamespace(queue_callback=held.append, run_backward=lambda *_, **__: runs.append(None))
    monkeypatch.setattr(torch.autograd, "Variable", SimpleNamespace(_execution_engine=engine))
    for threads in (0, 1):
        private.held_by_run(_Thing)
        other = threading.Thread(target=held.clear)
        (other.run if not threads else other.start)()
        if threads:
            other.join()
        assert not held
    assert len(runs) == 1


@pytest.mark.parametrize("hide", [False, True])
def test_a_function_is_called_where_a_run_fails(monkeypatch: pytest.MonkeyPatch, hide: bool) -> None:
    if hide:
        _hide(monkeypatch)
    told: list[str] = []

    def fail() -> None:
        raise ArithmeticError

    leaf = torch.ones((), requires_grad=True)
    _Asks.apply(leaf, lambda: private.when_run_fails(lambda: told.append("early"))).backward()
    private.when_run_fails(lambda: told.append("outside"))
    assert told == []
    loss = _Asks.apply(_Asks.apply(leaf, fail), lambda: private.when_run_fails(lambda: told.append("late")))
    with pytest.raises(ArithmeticError):
        loss.backward()
    assert told == ([] if hide else ["late"])
