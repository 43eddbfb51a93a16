"""``hosts``, ``nproc_per_host`` → how many workers run on which machine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from numbers import Integral

from torchopt_dist.launching import _slurm as slurm
from torchopt_dist.launching import _ssh as ssh
from torchopt_dist.launching._machine import Machine, ThisMachine, is_this_machine
from torchopt_dist.process.launchers import find_task

__all__ = ["Host", "Reach", "find_hosts", "name_hosts"]

Reach = Callable[[Sequence[str]], dict[str, Machine]]


@dataclass(frozen=True)
class Host:
    """One entry of ``hosts``.

    Attributes:
        name: its name in results and errors; the second ``"localhost"`` is ``"localhost#2"``.
        workers: the number of its workers.
        first_rank: the rank of its first worker; the others follow.
        machine: its machine.
    """

    name: str
    workers: int
    first_rank: int
    machine: Machine


def name_hosts(hosts: str | Sequence[str]) -> list[str]:
    """The names of the hosts; a machine that is given twice has two entries.

    Args:
        hosts: ``"auto"``, ``"slurm"``, or names of the form ``[user@]host[:port]``.

    Raises:
        ValueError: there is no host, a name has another form, the hosts of a SLURM job cannot be found out, or this
            program is one of several tasks of a launcher.
        TypeError: a name is not a string.
    """
    if isinstance(hosts, str):
        task = find_task()
        if task is not None and task.size > 1:
            raise ValueError(
                f"a launcher must run once, got {task.size} tasks of {task.row.name}: start it without that, or as one "
                f"task; or decorate `main` by `auto_init_rpc`, and {task.row.name} is the launcher"
            )
        if hosts == "slurm" or (hosts == "auto" and slurm.has_several_hosts()):
            return slurm.hosts_of_job()
        if hosts == "auto":
            return ["localhost"]
        raise TypeError(
            f'`hosts` must be "auto", "slurm" or a list of names, got {hosts!r}: write [{hosts!r}]'
        )
    names = list(hosts)
    if not names:
        raise ValueError("`hosts` must have at least one host, got none")
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"`hosts` must hold names, got {type(name).__name__} {name!r}")
        if not is_this_machine(name):
            ssh.check_name(name)
    return names


def find_hosts(
    hosts: str | Sequence[str], nproc_per_host: int | str | Sequence[int | str], reach: Reach | None = None
) -> list[Host]:
    """Find the machines, and how many workers run on each.

    Args:
        hosts: as in :func:`name_hosts`.
        nproc_per_host: a number, ``"auto"``, ``"cpu"``, ``"gpu"`` or ``"gpu:<number>"``; or one of these for each host.
        reach: a function from names of other machines to these machines; ``None`` if there are none.

    Raises:
        ValueError: an argument is out of range, or asks for more than a machine has.
        TypeError: an argument has the wrong type.
        InitializationError: a host cannot be reached.
    """
    names = name_hosts(hosts)
    if isinstance(nproc_per_host, Collection) and not isinstance(nproc_per_host, str):
        numbers = [_checked(number) for number in nproc_per_host]
        if len(numbers) != len(names):
            raise ValueError(
                f"`nproc_per_host` must have a number for each of the {len(names)} hosts, got {numbers}"
            )
    else:
        numbers = [_checked(nproc_per_host)] * len(names)
    machines = _machines(names, reach)
    of_job = isinstance(hosts, str)  # and not named by the user
    cpus = slurm.cpus_per_host(len(names)) if of_job else [None] * len(names)
    gpus = slurm.gpus_per_host(len(names)) if of_job else [None] * len(names)
    found: list[Host] = []
    rank = 0
    for index, (name, number) in enumerate(zip(names, numbers, strict=True)):
        before = names[:index].count(name)
        machine = machines[name]
        room = (_least(machine.cores, cpus[index]), _least(machine.gpus, gpus[index]))
        workers = _workers(number, name, *room)
        found.append(Host(f"{name}#{before + 1}" if before else name, workers, rank, machine))
        rank += workers
    return found


def _machines(names: list[str], reach: Reach | None) -> dict[str, Machine]:
    here = {name for name in names if is_this_machine(name)}
    others = [name for name in dict.fromkeys(names) if name not in here]
    machines: dict[str, Machine] = dict.fromkeys(here, ThisMachine())
    if others:
        assert reach is not None, f"there is no way to {others}"
        machines |= reach(others)
    return machines


def _least(there: int, of_job: int | None) -> int:
    return there if of_job is None else min(there, of_job)


RULE = '`nproc_per_host` must be an integer, "auto", "cpu", "gpu" or "gpu:<number>", or a list of these'


def _checked(number: object) -> int | str:
    """The entry of ``nproc_per_host`` for one host, checked; integers may be numpy's."""
    if isinstance(number, bool) or not isinstance(number, (Integral, str)):
        raise TypeError(f"{RULE}, got {type(number).__name__} {number!r}")
    if isinstance(number, Integral):
        if int(number) < 1:
            raise ValueError(f"`nproc_per_host` must be at least 1, got {number}")
        return int(number)
    kind, _, asked = number.partition(":")
    if kind not in ("auto", "cpu", "gpu") or (asked and (kind != "gpu" or not asked.isdecimal())):
        raise ValueError(f"{RULE}, got {number!r}")
    if asked and int(asked) < 1:
        raise ValueError(f"`nproc_per_host` must ask for at least one GPU, got {number!r}")
    return number


def _workers(number: int | str, name: str, cores: int, gpus: int) -> int:
    if isinstance(number, int):
        return number
    kind, _, asked = number.partition(":")
    if kind == "gpu":
        wanted = int(asked) if asked else max(gpus, 1)
        if wanted > gpus:
            raise ValueError(
                f"`nproc_per_host` must not ask for more GPUs than there are, {gpus} on {name}, got {number!r}"
            )
        return wanted
    return cores if kind == "cpu" else gpus or cores
