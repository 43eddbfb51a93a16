"""A Python command line → what it prints on stdout; anything on stderr, a warning among them, is a failure.

And an example → its module; what it prints → the rows of its table.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from tests.processes import python

LEARNS = pytest.mark.parametrize("learns", [False, pytest.param(True, marks=pytest.mark.nightly)])
"""A program with few steps, whose numbers are the same everywhere; and nightly with as many as what it claims needs."""


def run_python(*arguments: object, warm: bool = True) -> str:
    """The output of ``python -W error …``; in a new Python if it is not to be ``warm``."""
    done = python("-W", "error", *arguments, warm=warm)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout


def imported(source: Path) -> ModuleType:
    """The module of a program that is not started."""
    spec = importlib.util.spec_from_file_location(source.stem, source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def table(printed: str) -> list[list[str]]:
    """The cells of a printed table: its heading, and its rows."""
    lines = [line.strip("|").split("|") for line in printed.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line] for line in lines if set("".join(line)) != {"-"}]


def rows(printed: str) -> list[list[str]]:
    """The same without the heading."""
    return table(printed)[1:]


def numbers(cells: Sequence[str]) -> list[float]:
    """All numbers in some cells, in order."""
    return [float(one) for cell in cells for one in re.findall(r"-?\d+(?:\.\d+)?(?:e[-+]\d+)?", cell)]
