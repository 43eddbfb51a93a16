"""Each row of ``table.py``: what follows from a fault, in time, and nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.faults.table import FAULTS, Fault, launch, run
from tests.processes import ROOT, start_python
from tests.waits import soon, watch

PATIENCE = 0.5
PROGRAM = Path(__file__).parent / "orphan_program.py"


def assert_nothing_is_left(folder):
    """No process of the ranks, no file of theirs beside their own notes, and no shared memory of theirs."""
    pids = {path.name.removeprefix("pid") for path in folder.glob("pid*")}
    assert len(pids) >= 2
    assert not any(psutil.pid_exists(int(pid)) for pid in pids)
    assert {path.name for path in folder.iterdir()} == {f"pid{pid}" for pid in pids} | {"fault"}
    shared = Path("/dev/shm")
    names = [path.name for path in shared.iterdir()] if shared.exists() else []
    assert not [name for name in names if pids & set(name.split("_"))]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_told_or_survived_in_time(fault: Fault, tmp_path):
    endings, took = run(fault, tmp_path, PATIENCE)
    fault.check(endings)
    assert took < soon(fault.within) + PATIENCE * fault.waits
    assert_nothing_is_left(tmp_path)


DAILY = ("raises in a call", "is killed in a call", "`sys.exit(0)`", "is stopped")
"""Parts of the names of those faults that `make test` looks at in a launch, too."""


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(
            fault,
            id=fault.name,
            marks=[] if any(part in fault.name for part in DAILY) else pytest.mark.nightly,
        )
        for fault in FAULTS
    ],
)
def test_a_fault_in_a_launch_is_told_or_survived_in_time(fault: Fault, tmp_path):
    outcome, took = launch(fault, tmp_path, PATIENCE)
    fault.launched(outcome)
    assert took < soon(fault.within) + PATIENCE * fault.waits
    assert_nothing_is_left(tmp_path)


@pytest.mark.parametrize("busy", ["in Python", "in C"])
def test_a_worker_whose_agent_is_killed_ends(tmp_path, busy):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TORCHELASTIC_RUN_ID": "none"}
    with contextlib.closing(start_python(PROGRAM, tmp_path, busy, env=env)) as agent:
        assert watch(tmp_path / "busy", 60)
        worker = psutil.Process(int((tmp_path / "busy").read_text()))
        assert worker.ppid() == agent.pid
        started = time.monotonic()
        os.kill(agent.pid, signal.SIGKILL)
        gone, left = psutil.wait_procs([worker], timeout=30)
        for process in left:
            process.kill()
        assert gone
        assert time.monotonic() - started < soon(5)
    if busy == "in Python":
        assert (
            "AgentFailedError: the process that has started worker0 has ended"
            in (tmp_path / "end").read_text()
        )
