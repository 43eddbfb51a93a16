"""``breakpoint()`` in a worker of this machine: the debugger at the launcher's terminal, one rank at a time."""

from __future__ import annotations

import os
import pty

import pytest

from tests.processes import ON_TWO
from torchopt_dist.launching import launcher

pytestmark = pytest.mark.timeout(60)


def stops() -> int:
    found = 1
    breakpoint()
    return found


def test_each_rank_is_debugged_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = pty.openpty()
    monkeypatch.setattr(launcher, "terminal", lambda: os.ttyname(there))
    os.write(here, b"!found = 40 + found\nc\n" * 2)
    try:
        assert ON_TWO.run(stops).results == {"localhost": [41, 41]}
        os.set_blocking(here, False)
        shown = os.read(here, 1 << 14).decode()
    finally:
        os.close(here)
        os.close(there)
    assert "(Pdb, rank 0) " in shown
    assert "(Pdb, rank 1) " in shown
    assert "-> return found" in shown


def test_without_a_terminal_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "terminal", lambda: None)
    with pytest.raises(RuntimeError, match=r"needs the terminal .*: call the function in your own process"):
        ON_TWO.run(stops)
    monkeypatch.setattr(launcher, "terminal", lambda: "/dev/no-terminal")
    with pytest.raises(
        RuntimeError, match=r"/dev/no-terminal cannot be opened \(No such file or directory\)"
    ):
        ON_TWO.run(stops)


def test_a_debugger_of_the_user_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONBREAKPOINT", "0")
    assert ON_TWO.run(stops).results == {"localhost": [1, 1]}


def test_terminal_is_none_where_standard_input_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchopt_dist.launching._breakpoint import terminal

    monkeypatch.setattr("sys.stdin", None)
    assert terminal() is None
    with open(os.devnull, encoding="utf-8") as null:
        monkeypatch.setattr("sys.stdin", null)
        assert terminal() is None
