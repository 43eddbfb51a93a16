"""A script's path or a module's name, and its arguments → the program run in a worker as ``__main__``."""

from __future__ import annotations

import os
import runpy
import sys

__all__ = ["run_program"]


def run_program(program: str, arguments: list[str], module: bool) -> None:
    """Run a program as ``python program arguments`` does, or ``python -m program arguments``.

    Args:
        program: a path, or a module's name.
        arguments: its arguments.
        module: which of the two.

    Raises:
        SystemExit: the program exited with anything but 0.
    """
    sys.argv[:] = [program, *arguments]
    # The launcher's own first entry is the folder that it was started from, as it is for `python -m`.
    sys.path.insert(0, os.getcwd() if module else os.path.dirname(os.path.realpath(program)))
    try:
        if module:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(program, run_name="__main__")
    except SystemExit as ending:
        if ending.code not in (None, 0):
            raise
