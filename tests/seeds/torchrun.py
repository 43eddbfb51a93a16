"""Arguments of torchrun → a running job → its output, or the end of all its processes when time is up."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
TIMEOUT = 110
"""Seconds for jobs that take 5 to 20 on two idle cores; less than pytest's own time-out, which shows no output."""


def start(*arguments: object, module: str = "torch.distributed.run", **env: str) -> subprocess.Popen[str]:
    """A job of `torchrun` (or of `python -m` another module) on its way; `env` adds to the environment."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(*jobs: subprocess.Popen[str], timeout: float = TIMEOUT) -> list[str]:
    """The output of each job; fails with it if a job ends with an error or not at all."""
    outputs = []
    try:
        for job in jobs:
            output, _ = job.communicate(timeout=timeout)
            assert job.returncode == 0, f"exit code {job.returncode} of {job.args}\n{output}"
            outputs.append(output)
    except subprocess.TimeoutExpired as late:
        raise AssertionError(f"not ended after {timeout} s: {late.cmd}\n{late.stdout}") from None
    finally:
        for job in jobs:
            _kill(job)
    return outputs


def run(*arguments: object, timeout: float = TIMEOUT, **env: str) -> str:
    """The output of one job."""
    return finish(start(*arguments, **env), timeout=timeout)[0]


def _kill(job: subprocess.Popen[str]) -> None:
    if job.poll() is None:
        family = psutil.Process(job.pid)
        for process in (*family.children(recursive=True), family):
            process.kill()
        job.communicate()
