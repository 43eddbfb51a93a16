"""SLURM's variables → the job's hosts, the cores and GPUs that it has on each, and steps that run commands there."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping

__all__ = [
    "cpus_per_host",
    "expand_nodes",
    "expand_numbers",
    "gpus_per_host",
    "has_several_hosts",
    "hosts_of_job",
    "is_in_job",
    "own_environment",
    "step",
]

KEPT = ("SLURM_CONF", "SLURM_JOB_ID")
"""Those of SLURM's variables that a new step gets: from the others it would take what the job was submitted with, such
as the number of tasks on each node, and without the number of the job it would be a job of its own."""
NODES = re.compile(r"(?:[^\[\],\s]|\[[^\[\]\s]+\])+")
RANGE = re.compile(r"(\d+)(?:-(\d+))?")
NUMBER = re.compile(r"0*(\d+)(?:\(x(\d+)\))?")


def is_in_job(env: Mapping[str, str] = os.environ) -> bool:
    """Whether this program runs in a job, in its batch script or in one of its steps."""
    return "SLURM_JOB_ID" in env and "SLURM_JOB_NODELIST" in env


def has_several_hosts(env: Mapping[str, str] = os.environ) -> bool:
    """Whether this program runs in a job of several hosts.

    Example:
        >>> has_several_hosts({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"})
        True
        >>> has_several_hosts({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_HET_SIZE": "2"})
        True
    """
    several = env.get("SLURM_JOB_NUM_NODES", "1") != "1" or env.get("SLURM_HET_SIZE", "1") != "1"
    return "SLURM_JOB_ID" in env and several


def hosts_of_job(env: Mapping[str, str] = os.environ) -> list[str]:
    """The names of the job's hosts; those of all groups, if the job is heterogeneous.

    Raises:
        ValueError: there is no job, or its list of hosts cannot be read.

    Example:
        >>> hosts_of_job({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"})
        ['n1', 'n2']
    """
    if not is_in_job(env):
        raise ValueError(
            '`hosts="slurm"` must be used in a SLURM job, got no SLURM_JOB_ID and SLURM_JOB_NODELIST'
        )
    try:
        return [name for hosts in _by_group("SLURM_JOB_NODELIST", env) for name in expand_nodes(hosts)]
    except ValueError as error:
        raise ValueError(f"the hosts of the SLURM job cannot be found out: {error}") from None


def cpus_per_host(number: int, env: Mapping[str, str] = os.environ) -> list[int | None]:
    """How many processor cores the job has on each of its ``number`` hosts; ``None`` where SLURM does not say.

    Example:
        >>> cpus_per_host(3, {"SLURM_JOB_ID": "7", "SLURM_JOB_CPUS_PER_NODE": "8(x2),4"})
        [8, 8, 4]
    """
    groups = _by_group("SLURM_JOB_CPUS_PER_NODE", env) if "SLURM_JOB_ID" in env else []
    cpus = [cores for group in groups for cores in expand_numbers(group) or ()]
    return [*cpus] if len(cpus) == number and all(cpus) else [None] * number


def gpus_per_host(number: int, env: Mapping[str, str] = os.environ) -> list[int | None]:
    """How many GPUs the job has on each of its ``number`` hosts; ``None`` where SLURM does not say.

    A job that was submitted without ``--gpus-per-node`` tells the number on this host, which is taken for all.

    Example:
        >>> gpus_per_host(2, {"SLURM_JOB_ID": "7", "SLURM_GPUS_PER_NODE": "a100:4"})
        [4, 4]
        >>> gpus_per_host(2, {"SLURM_JOB_ID": "7", "SLURM_GPUS": "8", "SLURM_GPUS_ON_NODE": "4"})
        [4, 4]
    """
    if "SLURM_JOB_ID" not in env or env.get("SLURM_HET_SIZE", "1") != "1":
        return [None] * number
    text = env.get("SLURM_GPUS_PER_NODE") or env.get("SLURM_GPUS_ON_NODE", "")
    parts = [part.rpartition(":")[2] for part in text.split(",")]
    return [sum(map(int, parts)) if all(part.isdecimal() for part in parts) else None] * number


def step(host: str, env: Mapping[str, str] = os.environ) -> list[str]:
    """The beginning of a command that runs what follows on a host of the job, beside all else that runs there.

    Args:
        host: the host.
        env: the environment.

    Raises:
        ValueError: there is no job.
    """
    if not is_in_job(env):
        raise ValueError(
            '`shell="srun"` must be used in a SLURM job, got no SLURM_JOB_ID and SLURM_JOB_NODELIST'
        )
    groups = [expand_nodes(hosts) for hosts in _by_group("SLURM_JOB_NODELIST", env)]
    group = next((index for index, hosts in enumerate(groups) if host in hosts), 0)
    where = [f"--jobid={env['SLURM_JOB_ID']}", *([f"--het-group={group}"] if len(groups) > 1 else [])]
    alone = ["--overlap", "--quiet", "--nodes=1", "--ntasks=1", "--mpi=none"]
    gpus = gpus_per_host(1, env)[0]  # a step without this option has those of one task
    return ["srun", *where, *alone, *([f"--gpus={gpus}"] if gpus else []), f"--nodelist={host}"]


def own_environment(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment for a new step of the job, whose output comes as it is written and not line by line."""
    kept = {
        name: value
        for name, value in env.items()
        if name in KEPT or not name.startswith(("SLURM_", "SBATCH_", "SRUN_"))
    }
    return {**kept, "SLURM_UNBUFFEREDIO": "1"}


def _by_group(name: str, env: Mapping[str, str]) -> list[str]:
    """A variable of each group of a heterogeneous job, or of the whole of another job."""
    groups = int(env["SLURM_HET_SIZE"]) if env.get("SLURM_HET_SIZE", "").isdecimal() else 0
    found = [env[each] for index in range(groups) if (each := f"{name}_HET_GROUP_{index}") in env]
    return found or [env.get(name, "")]


# The form of its lists.


def expand_nodes(text: str) -> list[str]:
    """The names of the nodes in a list such as ``SLURM_JOB_NODELIST``.

    Raises:
        ValueError: the list has another form.

    Example:
        >>> expand_nodes("n[08-10,2],login,r[1-2]c[1-2]")
        ['n08', 'n09', 'n10', 'n2', 'login', 'r1c1', 'r1c2', 'r2c1', 'r2c2']
    """
    parts = NODES.findall(text)
    if ",".join(parts) != text or not parts:
        raise ValueError(f"a list of SLURM's nodes must be of the form n[1-3,5],m2, got {text!r}")
    return [name for part in parts for name in _names(part)]


def _names(part: str) -> list[str]:
    words = re.split(r"\[([^\]]*)\]", part)  # every second one was in brackets
    choices = [_range(word) if index % 2 else [word] for index, word in enumerate(words)]
    return ["".join(chosen) for chosen in itertools.product(*choices)]


def _range(text: str) -> list[str]:
    found: list[str] = []
    for part in text.split(","):
        match = RANGE.fullmatch(part)
        if match is None:
            raise ValueError(f"a range of SLURM's nodes must be of the form 1-3,5, got {text!r}")
        first, last = match[1], match[2] or match[1]
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return found


def expand_numbers(text: str) -> list[int] | None:
    """The numbers in a list such as ``SLURM_JOB_CPUS_PER_NODE``, one for each node; ``None`` if it has another form.

    Example:
        >>> expand_numbers("8(x2),4")
        [8, 8, 4]
    """
    found: list[int] = []
    for part in text.split(","):
        match = NUMBER.fullmatch(part)
        if match is None:
            return None
        found += [int(match[1])] * int(match[2] or 1)
    return found
