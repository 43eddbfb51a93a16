"""Arguments of torchrun → a running job → its output, or the end of all its processes when time is up."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path
from typing import Any

from tests.warm_python import Job, warm_python

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
TIMEOUT = 250
"""Seconds for jobs that take 1 to 5 on two idle cores; less than pytest's own time-out, which shows no output."""


def start(*arguments: object, warm: bool = True, cwd: Path = ROOT, **env: str) -> Job:
    """A job of `torchrun` on its way.

    Args:
        arguments: torchrun's.
        warm: whether torchrun and its workers are forks of a process that has imported torch; if not, each is a new
            Python, as `torchrun` on the command line makes them.
        cwd: the working directory.
        env: added to the environment.
    """
    forked = ("--run-path", "--start-method=fork") if warm else ()
    path = os.pathsep.join(
        map(str, (ROOT, *([PROGRAMS] if warm else [])))
    )  # as a new Python finds those beside it
    return warm_python().start(
        *("-m", "torch.distributed.run", *forked, *arguments),
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **env},
        merged=True,
        warm=warm,
    )


def finish(*jobs: Job, timeout: float = TIMEOUT) -> list[str]:
    """The output of each job; fails with it if a job ends with an error or not at all."""
    outputs = []
    with contextlib.ExitStack() as stack:
        for job in jobs:
            stack.enter_context(contextlib.closing(job))
        for job in jobs:
            try:
                done = job.finish(timeout)
            except subprocess.TimeoutExpired as late:
                raise AssertionError(f"not ended after {timeout} s: {late.cmd}\n{late.stdout}") from None
            assert done.returncode == 0, f"exit code {done.returncode} of {done.args}\n{done.stdout}"
            outputs.append(done.stdout)
    return outputs


def run(*arguments: object, timeout: float = TIMEOUT, **options: Any) -> str:
    """The output of one job, with the options of `start`."""
    return finish(start(*arguments, **options), timeout=timeout)[0]
