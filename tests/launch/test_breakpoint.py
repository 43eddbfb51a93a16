"""``breakpoint()`` in a worker of this machine: the debugger at the launcher's terminal, one rank at a time."""

from __future__ import annotations

import os
import pty
import select

import pytest

from tests.processes import ON_TWO
from tests.waits import wait_until
from torchopt_dist.launching import _settings as settings

pytestmark = pytest.mark.timeout(60)


def stops() -> int:
    found = 1
    breakpoint()
    return found


def test_each_rank_is_debugged_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = pty.openpty()
    monkeypatch.setattr(settings, "terminal", lambda: os.ttyname(there))
    os.write(here, b"!found = 40 + found\nc\n" * 2)
    try:
        assert ON_TWO.run(stops).results == {"localhost": [41, 41]}
        shown = ""

        def both_were_shown() -> bool:
            """A terminal gives what was written in parts, and some of them late."""
            nonlocal shown
            if select.select([here], [], [], 0)[0]:
                shown += os.read(here, 1 << 14).decode()
            return all(f"(Pdb, rank {rank}) " in shown for rank in range(2))

        wait_until(both_were_shown, tell=lambda: shown)
    finally:
        os.close(here)
        os.close(there)
    assert shown.count("-> return found") == 2


def test_without_a_terminal_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "terminal", lambda: None)
    with pytest.raises(RuntimeError, match=r"needs the terminal .*: call the function in your own process"):
        ON_TWO.run(stops)
    monkeypatch.setattr(settings, "terminal", lambda: "/dev/no-terminal")
    with pytest.raises(
        RuntimeError, match=r"/dev/no-terminal cannot be opened \(No such file or directory\)"
    ):
        ON_TWO.run(stops)


def test_a_debugger_of_the_user_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONBREAKPOINT", "0")
    assert ON_TWO.run(stops).results == {"localhost": [1, 1]}


def test_terminal_is_none_where_standard_input_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert settings.terminal() is None
    with open(os.devnull, encoding="utf-8") as null:
        monkeypatch.setattr("sys.stdin", null)
        assert settings.terminal() is None
