"""Tests of several workers → those that run alone wait for the others, and the others for them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.turns import Turns


@pytest.fixture
def workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Turns]]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    made = [Turns("run") for _ in range(3)]
    yield made
    for worker in made:
        worker.close()
    assert list(tmp_path.iterdir()) == []


def enter(worker: Turns, alone: bool) -> tuple[threading.Thread, threading.Event]:
    """A thread that waits for the room, and what it says when it is in there."""
    inside = threading.Event()

    def run() -> None:
        with worker.turn(alone):
            inside.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, inside


def test_the_others_run_beside_each_other(workers: list[Turns]) -> None:
    with workers[0].turn(alone=False):
        thread, inside = enter(workers[1], alone=False)
        thread.join(60)
        assert inside.is_set()


@pytest.mark.parametrize(("mine", "theirs"), [(True, False), (False, True), (True, True)])
def test_one_of_them_alone_waits(workers: list[Turns], mine: bool, theirs: bool) -> None:
    with workers[0].turn(mine):
        thread, inside = enter(workers[1], theirs)
        assert not inside.wait(0.1)
    thread.join(60)
    assert inside.is_set()


def test_who_waits_to_be_alone_is_not_overtaken(workers: list[Turns]) -> None:
    with workers[0].turn(alone=False):
        first, alone = enter(workers[1], alone=True)
        assert not alone.wait(0.1)
        second, beside = enter(workers[2], alone=False)
        assert not beside.wait(0.1)
    for thread in (first, second):
        thread.join(60)
    assert alone.is_set()
    assert beside.is_set()
