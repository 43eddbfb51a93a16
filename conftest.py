"""All tests → which of them start processes or compile; which files go first among workers.

``make test`` has two workers of pytest-xdist, which take one file after the other.
"""

from __future__ import annotations

import functools
import gc
import logging
import os
import re
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from tests import nightly, without_rpc
from tests.limits import Limits
from tests.processes import World

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # as in a job in the background, whose Ctrl-C tests would wait
    signal.signal(signal.SIGINT, signal.default_int_handler)
_logs = tempfile.TemporaryDirectory(prefix="todist-logs-")
os.environ["TODIST_LOG_DIR"] = _logs.name  # so that launches of tests leave no files in the working folder

ROOT = Path(__file__).parent
LONGEST_FIRST = (
    "tests/packaging",
    "tests/diff/test_compiled.py",
    "tests/diff/test_data_parallel.py",
    "tests/distributed/life/test_torchrun_elastic.py",
    "tests/examples",
    "tests/docs/test_examples.py",
    "tests/seeds",
    "tests/launch",
    "tests/optim/test_every_optimizer.py",
    "tests/faults",
    "tests/distributed",
    "tests/process/test_network.py",
    "tests/docs",
    "tests/optim",
    "tests/ops",
)
"""Files and folders in the order in which workers take them; the others come last, and are short."""

STARTS_PROCESSES = re.compile(
    r"\b(subprocess|multiprocessing|torchrun|warm_python|tests\.processes|World|Hosts)\b"
)
"""Names in the text of a test file that starts processes; so does a test with the fixture `world`."""


@pytest.fixture
def world() -> type[World]:
    """``world(n)``: n worker processes; see ``tests/processes.py``."""
    return World


@pytest.fixture(autouse=True)
def _workers_without_rpc(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if without_rpc.hides_rpc(request.node):
        monkeypatch.setenv(without_rpc.VARIABLE, "1")


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Limits:
    """``limits(grace_seconds=0.02)``; see ``tests/limits.py``."""
    return Limits(monkeypatch)


@functools.cache
def place(path: Path) -> int:
    """The place of a test file in ``LONGEST_FIRST``."""
    name = path.relative_to(ROOT).as_posix()
    fitting = (index for index, start in enumerate(LONGEST_FIRST) if name.startswith(start))
    return next(fitting, len(LONGEST_FIRST))


@functools.cache
def starts_processes(path: Path) -> bool:
    """Tell whether the tests of a file start processes; those of the launcher and the examples do."""
    if path.relative_to(ROOT).parts[1] in ("launch", "examples"):
        return True
    return STARTS_PROCESSES.search(path.read_text("utf-8")) is not None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import the files that ``make quick`` leaves out."""
    if collection_path.match("test_*.py") and without_rpc.cannot_be_imported(collection_path):
        return True
    if config.option.markexpr.startswith("not processes") and collection_path.match("test_*.py"):
        return starts_processes(collection_path) or None
    return None


TRACE = logging.getLogger("torch.__trace")
"""What the compiler tells, if anybody listens. Pytest does, to each logger that does not propagate."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Import the tests without the garbage collector, and have it look at what they make alone, and seldom.

    It walked over all modules and tests several times, a third of the time of importing them; and later so often that a
    sixth of the time of the tests that compile went into it.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        TRACE.propagate = True
        gc.freeze()
        gc.set_threshold(50_000, 20, 50)
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    without_rpc.leave_out(config, items)
    nightly.leave_rows(items)
    for item in items:
        if "world" in getattr(item, "fixturenames", ()) or starts_processes(item.path):
            item.add_marker(pytest.mark.processes)
        if "compile" in item.function.__code__.co_names:
            item.add_marker(pytest.mark.compiles)
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: place(item.path))


def pytest_configure(config: pytest.Config) -> None:
    nightly.give_named_ones_whole(config)
