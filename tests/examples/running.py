"""A Python command line → what it prints on stdout; anything on stderr, a warning among them, is a failure."""

from __future__ import annotations

import os

from tests.seeds.torchrun import ROOT, TIMEOUT
from tests.warm_python import warm_python


def run_python(*arguments: object, warm: bool = True) -> str:
    """The output of ``python -W error …``; in a new Python if it is not to be ``warm``."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = warm_python().run("-W", "error", *arguments, env=env, timeout=TIMEOUT, warm=warm)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout
