"""The environment variables of any launcher → those of torchrun: rank, world size, local rank, and where to meet.

One table has a row for each launcher. It is read where torchrun's own variables, RANK and WORLD_SIZE, are missing.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral

from torchopt_dist.errors import InitializationError
from torchopt_dist.process.network import LOOPBACK
from torchopt_dist.process.slurm import expand_nodes, expand_numbers

__all__ = ["LAUNCHERS", "NAMES", "Row", "Task", "find_task", "world_variables"]

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
WHAT_TO_SET = f"set {', '.join(NAMES[:-1])} and {NAMES[-1]} in each task, or start the program by torchrun"
FIRST_PORT, PORTS = 20_000, 10_000
"""Below the ports that Linux gives to those who ask for any."""
TORCH_PORT = 29_500
"""Torch's own choice, where no variable tells one run from another."""
RUNS = ("SUBMITIT_LOCAL_JOB_ID", "PMIX_NAMESPACE", "PMI_JOBID", "SLURM_JOB_ID", "LSB_JOBID", "PBS_JOBID")
"""Variables that tell one run from another; the first that is set counts, since not each task has all."""
STEP, NODE, LSF_HOSTS = "SLURM_STEP_ID", "SLURM_NODEID", "LSB_MCPU_HOSTS"
TASK, TERMINAL = "SLURM_TASK_PID", "SLURM_PTY_PORT"
"""The process that srun has started as a task, and what ``srun --pty`` sets, which gives its first task a terminal."""


@dataclass(frozen=True)
class Row:
    """A launcher, and the names of its variables.

    Attributes:
        name: the launcher.
        rank: a task's rank among all.
        size: how many tasks there are.
        local_rank: a task's rank on its machine.
        local_size: how many tasks there are on the machine; or on each node, in SLURM's short form.
        hosts: a list of hosts; rank 0 is on the first one.
    """

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    hosts: str = "SLURM_JOB_NODELIST"


SRUN = Row(
    "srun",
    rank="SLURM_PROCID",
    size="SLURM_STEP_NUM_TASKS",
    local_rank="SLURM_LOCALID",
    local_size="SLURM_STEP_TASKS_PER_NODE",
    hosts="SLURM_STEP_NODELIST",
)
LAUNCHERS = (
    SRUN,
    Row(  # as it does on one machine; in SLURM its jobs are tasks of srun
        "submitit",
        rank="SUBMITIT_LOCAL_GLOBALID",
        size="SUBMITIT_LOCAL_NTASKS",
        local_rank="SUBMITIT_LOCAL_LOCALID",
        local_size="SUBMITIT_LOCAL_NTASKS",
        hosts="",
    ),
    Row(
        "Open MPI",
        rank="OMPI_COMM_WORLD_RANK",
        size="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    Row(
        "MVAPICH2",
        rank="MV2_COMM_WORLD_RANK",
        size="MV2_COMM_WORLD_SIZE",
        local_rank="MV2_COMM_WORLD_LOCAL_RANK",
        local_size="MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    Row(
        "jsrun",
        rank="JSM_NAMESPACE_RANK",
        size="JSM_NAMESPACE_SIZE",
        local_rank="JSM_NAMESPACE_LOCAL_RANK",
        local_size="JSM_NAMESPACE_LOCAL_SIZE",
        hosts=LSF_HOSTS,
    ),
    Row(
        "PMI (MPICH, Intel MPI, Flux)",
        rank="PMI_RANK",
        size="PMI_SIZE",
        local_rank="MPI_LOCALRANKID",
        local_size="MPI_LOCALNRANKS",
    ),
)
"""Kubeflow and Ray Train set RANK and WORLD_SIZE themselves. Of several launchers the first counts whose variables are
there."""
BARE_MARKS = ("PMIX_RANK", "PALS_RANKID", "ALPS_APP_PE")
"""Set by launchers that do not say how many tasks there are."""


@dataclass(frozen=True)
class Task:
    """This process, as its launcher has told it.

    Attributes:
        row: the launcher.
        rank: its rank.
        size: the number of tasks.
        local_rank: its rank on its machine; ``None``: the launcher does not say.
        local_size: the number of tasks on its machine; ``None``: the launcher does not say.
        address: the host of rank 0; ``None``: the launcher does not say.
        port: the port at which this run's tasks meet.
    """

    row: Row
    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    address: str | None
    port: int

    def variables(self) -> dict[str, str]:
        """Torchrun's variables, as far as they are known."""
        return _named(self.rank, self.size, self.local_rank, self.local_size, self.address, self.port)


def find_task(env: Mapping[str, str] = os.environ, pid: int | None = None) -> Task | None:
    """This process as a task of a launcher of the table; ``None``: torchrun's own variables are set, or there is none.

    Args:
        env: the environment.
        pid: this process's id, by default its own.

    Raises:
        InitializationError: a launcher has started several tasks, and its variables do not say which one this is, or
            those of two launchers contradict each other.

    Example:
        >>> find_task({"PMI_RANK": "1", "PMI_SIZE": "4"}).variables()
        {'RANK': '1', 'WORLD_SIZE': '4', 'MASTER_PORT': '29500'}
    """
    if "RANK" in env or "WORLD_SIZE" in env:
        return None
    rows = [row for row in LAUNCHERS if _has_set(row, env) and not (row is SRUN and _is_in_shell(env, pid))]
    if not rows:
        for mark in BARE_MARKS:
            if mark in env:
                raise InitializationError(
                    f"a launcher has set {mark}={env[mark]}, but no variable says how many tasks it has started: "
                    f"{WHAT_TO_SET}"
                )
        return None
    first, *others = [_task(row, env) for row in rows]
    if others and first.row is SRUN and _runs_others(first, others, env, pid):
        first, *others = others
    for other in others:
        if (first.rank, first.size) != (other.rank, other.size):
            told = "; ".join(
                f"{task.row.name}: {task.row.rank}={task.rank}, {task.row.size}={task.size}"
                for task in (first, other)
            )
            raise InitializationError(
                f"two launchers have started this process, one in the other, and they contradict each other ({told}): "
                f"use one of them, or {WHAT_TO_SET}"
            )
    return first


def world_variables(
    rank: int,
    size: int,
    *,
    address: str,
    port: int,
    local_rank: int | None = None,
    local_size: int | None = None,
    restarts: int | None = None,
) -> dict[str, str]:
    """Make the environment variables of one worker, as torchrun would set them, for workers that another engine starts.

    In a worker with these variables a function decorated by :func:`~torchopt_dist.auto_init_rpc` joins the others.

    Args:
        rank: the worker's rank, in ``[0, size)``.
        size: the number of workers.
        address: the name or the address of the machine of rank 0, as the others reach it.
        port: a port that is free there.
        local_rank: the worker's rank among those on its machine. ``None``: the workers count the names of their
            machines when they meet.
        local_size: the number of workers on its machine; ``None`` if and only if ``local_rank`` is.
        restarts: how often the workers have been started again; ``None``: that is not said.

    Returns:
        Variable → value.

    Raises:
        ValueError: a number is out of range, or the address is empty.
        TypeError: an argument has the wrong type.

    Example:
        >>> from torchopt_dist.launching import world_variables
        >>> world_variables(1, 4, address="node1", port=29500)
        {'RANK': '1', 'WORLD_SIZE': '4', 'MASTER_ADDR': 'node1', 'MASTER_PORT': '29500'}
    """
    _check("size", size, 1)
    _check("rank", rank, 0, size)
    _check("port", port, 1, 1 << 16)
    if not isinstance(address, str):
        raise TypeError(f"`address` must be a string, got {type(address).__name__} {address!r:.200}")
    if not address:
        raise ValueError("`address` must name the machine of rank 0, got an empty string")
    if (local_rank is None) is not (local_size is None):
        raise ValueError(
            f"`local_rank` and `local_size` must be given together, got {local_rank!r} and {local_size!r}"
        )
    if local_rank is not None and local_size is not None:
        _check("local_size", local_size, 1, size + 1)
        _check("local_rank", local_rank, 0, local_size)
    if restarts is not None:
        _check("restarts", restarts, 0)
    made = _named(rank, size, local_rank, local_size, address, port)
    return made if restarts is None else {**made, "TORCHELASTIC_RESTART_COUNT": str(restarts)}


def _named(*values: object) -> dict[str, str]:
    """Torchrun's variables, in the order of :data:`NAMES`; ``None``: it is not known."""
    return {name: str(value) for name, value in zip(NAMES, values, strict=True) if value is not None}


def _check(name: str, value: object, least: int, end: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"`{name}` must be an integer, got {type(value).__name__} {value!r:.200}")
    if not least <= int(value) < (end or int(value) + 1):
        rule = f"at least {least}" if end is None else f"in [{least}, {end})"
        raise ValueError(f"`{name}` must be {rule}, got {value}")


def _has_set(row: Row, env: Mapping[str, str]) -> bool:
    """Whether a launcher has set its variables; raises ``InitializationError`` if some of them are missing."""
    if row is SRUN and STEP not in env:  # a batch script has SLURM_PROCID=0, too
        return False
    found = [name for name in (row.rank, row.size) if name in env]
    if len(found) == 1:
        (missing,) = {row.rank, row.size} - {*found}
        raise InitializationError(
            f"{row.name} has set {found[0]}={env[found[0]]}, and {missing} is missing: {WHAT_TO_SET}"
        )
    return bool(found)


def _task(row: Row, env: Mapping[str, str]) -> Task:
    """This process as the row's variables tell it; raises ``InitializationError`` if one is not a number."""
    rank, size = _number(row.rank, env), _number(row.size, env)
    if not 0 <= rank < size:
        raise InitializationError(
            f"{row.rank} must be in [0, {row.size}), got {row.rank}={rank} and {row.size}={size}"
        )
    local_rank = _number(row.local_rank, env) if row.local_rank in env else None
    sizes = expand_numbers(env.get(row.local_size, "")) or []
    node = _number(NODE, env) if row is SRUN and NODE in env else 0
    local_size = sizes[node] if node < len(sizes) else None
    if local_rank is None or local_size is None or not 0 <= local_rank < local_size <= size:
        local_rank = local_size = None
    hosts = _hosts(row, env)
    address = LOOPBACK if local_size == size else hosts[0] if hosts else None
    return Task(row, rank, size, local_rank, local_size, address, _port(row, env))


def _number(name: str, env: Mapping[str, str]) -> int:
    try:
        return int(env[name])
    except ValueError:
        raise InitializationError(
            f"the environment variable {name} must be an integer, got {env[name]!r}"
        ) from None


def _hosts(row: Row, env: Mapping[str, str]) -> list[str]:
    """The hosts of the tasks, if the launcher tells them, that of rank 0 first."""
    text = env.get(row.hosts, "")
    if row.hosts == LSF_HOSTS:
        hosts = text.split()[::2]  # pairs of a host and its slots
        return hosts[1:] or hosts  # of several, the first runs the job's script only
    try:
        return expand_nodes(text) if text else []
    except ValueError as error:
        raise InitializationError(f"the environment variable {row.hosts} cannot be read: {error}") from None


def _port(row: Row, env: Mapping[str, str]) -> int:
    """A port that is the same in all tasks of a run, and most likely another one in another run."""
    if row is SRUN:
        run = f"{env.get('SLURM_JOB_ID')}.{env[STEP]}"
    else:
        run = next((env[name] for name in RUNS if name in env), "")
    return FIRST_PORT + zlib.crc32(run.encode()) % PORTS if run else TORCH_PORT


def _is_task(env: Mapping[str, str], pid: int | None) -> bool:
    """Whether srun has started this very process."""
    return env.get(TASK) == str(os.getpid() if pid is None else pid)


def _is_in_shell(env: Mapping[str, str], pid: int | None) -> bool:
    """Whether a user has typed the program's name into a shell that ``srun --pty`` has opened: only one task has."""
    return TERMINAL in env and not _is_task(env, pid)


def _runs_others(srun: Task, others: Sequence[Task], env: Mapping[str, str], pid: int | None) -> bool:
    """Whether srun has started a shell, or the daemons of another launcher, one on each node, and not this process."""
    if _is_task(env, pid):
        return False
    if srun.size == 1:
        return True
    each = expand_numbers(env.get(srun.row.local_size, "")) or []
    return any(task.size > 1 for task in others) and {*each} == {1}
