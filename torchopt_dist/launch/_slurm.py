"""SLURM's variables → the hosts of the job, and the cores and GPUs that the job has on each."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping

__all__ = ["cpus_per_host", "gpus_per_host", "has_several_hosts", "hosts_of_job"]

SECONDS = 20.0


def has_several_hosts(env: Mapping[str, str] = os.environ) -> bool:
    """Whether this program runs in a job of several hosts.

    Example:
        >>> has_several_hosts({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"})
        True
    """
    return "SLURM_JOB_ID" in env and env.get("SLURM_JOB_NUM_NODES", "1") != "1"


def hosts_of_job(env: Mapping[str, str] = os.environ) -> list[str]:
    """The names of the job's hosts, by ``scontrol``.

    Raises:
        ValueError: there is no job, its hosts cannot be found out, or this program is one of several tasks of ``srun``.
    """
    if "SLURM_JOB_ID" not in env or "SLURM_JOB_NODELIST" not in env:
        raise ValueError(
            '`hosts="slurm"` must be used in a SLURM job, got no SLURM_JOB_ID and SLURM_JOB_NODELIST'
        )
    tasks = env.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks != "1":
        raise ValueError(
            f"a launcher must run once in a SLURM job, got {tasks} tasks of srun: start it from the batch script "
            "without srun, or by `srun --ntasks=1`, or name its `hosts`"
        )
    command = ["scontrol", "show", "hostnames", env["SLURM_JOB_NODELIST"]]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=SECONDS, check=True, env=dict(env)
        )
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or "").strip()
        raise ValueError(
            f"the hosts of the SLURM job cannot be found out: {error} {said}".rstrip()
        ) from error
    names = done.stdout.split()
    if not names:
        raise ValueError(
            f"the hosts of the SLURM job cannot be found out: {' '.join(command)} printed nothing"
        )
    return names


def cpus_per_host(number: int, env: Mapping[str, str] = os.environ) -> list[int | None]:
    """How many processor cores the job has on each of its ``number`` hosts; ``None`` where SLURM does not say.

    Example:
        >>> cpus_per_host(3, {"SLURM_JOB_ID": "7", "SLURM_JOB_CPUS_PER_NODE": "8(x2),4"})
        [8, 8, 4]
    """
    cpus: list[int | None] = []
    for part in _of_job("SLURM_JOB_CPUS_PER_NODE", env).split(","):
        match = re.fullmatch(r"0*([1-9]\d*)(?:\(x(\d+)\))?", part)
        if match:
            cpus += [int(match[1])] * int(match[2] or 1)
    return cpus if len(cpus) == number else [None] * number


def gpus_per_host(number: int, env: Mapping[str, str] = os.environ) -> list[int | None]:
    """How many GPUs the job has on each of its ``number`` hosts; ``None`` where SLURM does not say.

    Example:
        >>> gpus_per_host(2, {"SLURM_JOB_ID": "7", "SLURM_GPUS_PER_NODE": "a100:4"})
        [4, 4]
    """
    parts = [part.rpartition(":")[2] for part in _of_job("SLURM_GPUS_PER_NODE", env).split(",")]
    return [sum(map(int, parts)) if all(part.isdecimal() for part in parts) else None] * number


def _of_job(name: str, env: Mapping[str, str]) -> str:
    """A variable of the job; ``None`` outside a job, where the variable comes from elsewhere."""
    return env.get(name, "") if "SLURM_JOB_ID" in env else ""
