"""A Python command line → what it prints on stdout; anything on stderr, a warning among them, is a failure."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from tests.processes import python


def run_python(*arguments: object, warm: bool = True) -> str:
    """The output of ``python -W error …``; in a new Python if it is not to be ``warm``."""
    done = python("-W", "error", *arguments, warm=warm)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout


def imported(example: Path) -> ModuleType:
    """A program as a module."""
    spec = importlib.util.spec_from_file_location(example.stem, example)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(printed: str) -> list[list[str]]:
    """The cells of the rows of the table that a program has printed, but for its header."""
    lines = [line.strip("| ").split(" | ") for line in printed.splitlines() if line.startswith("|")]
    return lines[2:]


def numbers(cells: Sequence[str]) -> list[float]:
    """All numbers in some cells, in order."""
    return [float(one) for cell in cells for one in re.findall(r"-?\d+(?:\.\d+)?(?:e[-+]\d+)?", cell)]
