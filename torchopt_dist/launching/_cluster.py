"""``hosts``, ``nproc_per_host`` → how many workers run on which machine. Machines that were reached stay connected.

If the hosts are those of a SLURM job, its variables say how many cores and GPUs it has on each.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from numbers import Integral

from torchopt_dist.errors import InitializationError
from torchopt_dist.launching._connections import UnreachedError, check_name, in_loop
from torchopt_dist.launching._forkserver import read_on_import
from torchopt_dist.launching._machines import (
    CLOSE_SECONDS,
    Machine,
    RemoteMachine,
    RemoteOptions,
    ThisMachine,
    is_this_machine,
)
from torchopt_dist.process import slurm
from torchopt_dist.process.launchers import find_task

__all__ = ["Host", "Reach", "close_all", "connect", "find_hosts", "name_hosts"]

log = logging.getLogger(__package__)

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
            check_name(name)
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
    numbers: list[object] = [nproc_per_host] * len(names)
    if isinstance(nproc_per_host, Collection) and not isinstance(nproc_per_host, str):
        numbers = list(nproc_per_host)
        if len(numbers) != len(names):
            raise ValueError(
                f"`nproc_per_host` must have a number for each of the {len(names)} hosts, got {numbers}"
            )
    here = {name for name in names if is_this_machine(name)}
    machines: dict[str, Machine] = dict.fromkeys(here, ThisMachine())
    if others := [name for name in dict.fromkeys(names) if name not in here]:
        assert reach is not None, f"there is no way to {others}"
        machines |= reach(others)
    of_job = isinstance(hosts, str)  # and not named by the user
    cpus = slurm.cpus_per_host(len(names)) if of_job else [None] * len(names)
    gpus = slurm.gpus_per_host(len(names)) if of_job else [None] * len(names)
    entries: list[Host] = []
    rank = 0
    for index, (name, number) in enumerate(zip(names, numbers, strict=True)):
        before = names[:index].count(name)
        machine = machines[name]
        room = (_least(machine.cores, cpus[index]), _least(machine.gpus, gpus[index]))
        workers = _workers(number, name, *room)
        entries.append(Host(f"{name}#{before + 1}" if before else name, workers, rank, machine))
        rank += workers
    return entries


def _least(there: int, of_job: int | None) -> int:
    return there if of_job is None else min(there, of_job)


def _workers(number: object, name: str, cores: int, gpus: int) -> int:
    if isinstance(number, Integral):  # numpy's, too
        return int(number)
    kind, _, gpus_text = str(number).partition(":")
    if kind == "gpu":
        wanted = int(gpus_text) if gpus_text else max(gpus, 1)
        if wanted > gpus:
            raise ValueError(
                f"`nproc_per_host` must not ask for more GPUs than there are, {gpus} on {name}, got {number!r}"
            )
        return wanted
    return cores if kind == "cpu" else gpus or cores


# Connections to other machines.

_Key = tuple[int, str, RemoteOptions, tuple[tuple[str, str], ...]]
_machines: dict[_Key, asyncio.Task[RemoteMachine]] = {}
"""What has been reached, or is about to be: by process, name, options, and the variables that libraries read there."""


def connect(
    names: Sequence[str],
    options: RemoteOptions,
    seconds: float,
    otherwise: Callable[[str, str], Machine] | None = None,
) -> dict[str, Machine]:
    """Reach hosts, all at once. Connections of an earlier launch are used again.

    Args:
        names: ``[user@]host[:port]``, each.
        options: the settings.
        seconds: the time limit for all of them together.
        otherwise: a function from the name of a host that cannot be reached, and the reason, to a machine in its place;
            ``None``: such a host is an error.

    Raises:
        InitializationError: a host cannot be reached, or lacks what a launch needs.
    """
    machines: dict[str, Machine] = {}
    errors: list[BaseException] = []
    reach = _reach_all if options.otherwise is None else _reach_job
    reached = in_loop(reach(names, options, seconds)).result()
    for name, machine in zip(names, reached, strict=True):
        if isinstance(machine, Machine):
            machines[name] = machine
        elif otherwise is not None and isinstance(machine, InitializationError):
            machines[name] = otherwise(name, str(machine))
        else:
            errors.append(machine)
    if len(errors) > 1 and all(isinstance(error, InitializationError) for error in errors):
        raise InitializationError("\n".join(map(str, errors))) from errors[0]
    for error in errors:
        raise error
    return machines


async def _reach_job(
    names: Sequence[str], by_ssh: RemoteOptions, seconds: float
) -> list[RemoteMachine | BaseException]:
    """Reach hosts of a job by SSH or, if it reaches none, by a command; later ones in the way that has worked."""
    assert by_ssh.otherwise is not None
    by_command = replace(by_ssh, shell=by_ssh.otherwise, otherwise=None)
    ways = {options for pid, _, options, _ in _machines if pid == os.getpid()}
    if by_command in ways:
        return await _reach_all(names, by_command, seconds)
    first = await _reach_all(names, by_ssh, seconds)
    if by_ssh in ways:
        return first
    if any(not isinstance(each, UnreachedError) for each in first):
        log.info("the hosts of the job are reached by SSH")
        return first
    log.warning("%s; so %s starts what runs on the hosts", first[0], by_ssh.otherwise)
    second = await _reach_all(names, by_command, seconds)
    return [
        InitializationError(f"{why}\n{each}") if isinstance(each, InitializationError) else each
        for why, each in zip(first, second, strict=True)
    ]


async def _reach_all(
    names: Sequence[str], options: RemoteOptions, seconds: float
) -> list[RemoteMachine | BaseException]:
    loaded = tuple(sorted(read_on_import(options.env).items()))
    tasks = []
    for name in names:
        key = (os.getpid(), name, options, loaded)
        task = _machines.get(key)
        if task is None or (task.done() and (task.exception() or task.result().why_lost() is not None)):
            task = _machines[key] = asyncio.create_task(RemoteMachine.start(name, options, seconds))
        tasks.append(task)
    # A host is kept though the launch may be interrupted; another launch may wait for it.
    machines = await asyncio.gather(*map(asyncio.shield, tasks), return_exceptions=True)
    for known, task in list(_machines.items()):
        if task.done() and task.exception() is not None:
            _machines.pop(known, None)
    return machines


def close_all(names: Collection[str] | None = None) -> None:
    """End the connections of this process.

    Args:
        names: the hosts whose connections end; ``None`` means all.
    """
    keys = [key for key in _machines if key[0] == os.getpid() and (names is None or key[1] in names)]
    tasks = [_machines.pop(key) for key in keys]
    if tasks:
        with contextlib.suppress(TimeoutError):
            in_loop(_close(tasks)).result(CLOSE_SECONDS)


async def _close(tasks: list[asyncio.Task[RemoteMachine]]) -> None:
    machines = [task.result() for task in tasks if task.done() and not task.exception()]
    await asyncio.gather(*(machine.close() for machine in machines))


atexit.register(close_all)
