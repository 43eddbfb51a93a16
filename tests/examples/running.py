"""A Python command line → what it prints on stdout; anything on stderr, a warning among them, is a failure."""

from __future__ import annotations

from tests.processes import python


def run_python(*arguments: object, warm: bool = True) -> str:
    """The output of ``python -W error …``; in a new Python if it is not to be ``warm``."""
    done = python("-W", "error", *arguments, warm=warm)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout
