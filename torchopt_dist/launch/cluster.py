"""``hosts``, ``nproc_per_host`` → how many workers run on which machine.

So far every host is this machine, under one of its names; it may be given more than once.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import psutil
import torch

__all__ = ["Host", "find_hosts"]

SLURM = "SLURM_JOB_NUM_NODES"


@dataclass(frozen=True)
class Host:
    """One entry of ``hosts``.

    Attributes:
        name: the name that results and errors have; the second ``"localhost"`` is ``"localhost#2"``.
        workers: how many workers run there.
        first_rank: the rank of its first worker; the others follow.
    """

    name: str
    workers: int
    first_rank: int


def find_hosts(hosts: str | Sequence[str], nproc_per_host: int | str | Sequence[int | str]) -> list[Host]:
    """Say how many workers run on each host.

    Args:
        hosts: ``"auto"``, or names of hosts.
        nproc_per_host: a number, ``"auto"``, ``"cpu"``, ``"gpu"`` or ``"gpu:<number>"``; or one of these for each host.

    Raises:
        ValueError: a host is not this machine, or a number is below 1 or above what the machine has.
        TypeError: an argument is of the wrong type.
    """
    names = _names(hosts)
    if isinstance(nproc_per_host, (int, str)):
        numbers: list[int | str] = [nproc_per_host] * len(names)
    else:
        numbers = list(nproc_per_host)
        if len(numbers) != len(names):
            raise ValueError(
                f"`nproc_per_host` must have a number for each of the {len(names)} hosts, got {numbers}"
            )
    found: list[Host] = []
    rank = 0
    for index, (name, number) in enumerate(zip(names, numbers, strict=True)):
        before = names[:index].count(name)
        workers = _workers(number)
        found.append(Host(f"{name}#{before + 1}" if before else name, workers, rank))
        rank += workers
    return found


def _names(hosts: str | Sequence[str]) -> list[str]:
    if hosts == "auto":
        nodes = os.environ.get(SLURM, "1")
        if nodes != "1":
            raise ValueError(
                f'`hosts="auto"` must find this machine alone, got a SLURM job of {nodes} nodes ({SLURM}): workers '
                'are launched on this machine only; ask for that with `hosts=["localhost"]`, or use `srun torchrun`'
            )
        return ["localhost"]
    if isinstance(hosts, str):
        raise TypeError(f'`hosts` must be "auto" or a list of names, got {hosts!r}: write [{hosts!r}]')
    names = list(hosts)
    if not names:
        raise ValueError("`hosts` must have at least one host, got none")
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"`hosts` must hold names, got {type(name).__name__} {name!r}")
        if not _is_this_machine(name):
            raise ValueError(
                f"`hosts` must hold names or addresses of this machine, such as 'localhost' or "
                f"{socket.gethostname()!r}, since workers are launched here only, got {name!r}"
            )
    return names


def _is_this_machine(name: str) -> bool:
    own = socket.gethostname()
    addresses = {a.address for known in psutil.net_if_addrs().values() for a in known}
    return name in {"localhost", "127.0.0.1", "::1", own, own.partition(".")[0]} | addresses


def _workers(number: int | str) -> int:
    rule = '`nproc_per_host` must be an integer, "auto", "cpu", "gpu" or "gpu:<number>", or a list of these'
    if isinstance(number, bool) or not isinstance(number, (int, str)):
        raise TypeError(f"{rule}, got {type(number).__name__} {number!r}")
    if isinstance(number, int):
        if number < 1:
            raise ValueError(f"`nproc_per_host` must be at least 1, got {number}")
        return number
    kind, _, asked = number.partition(":")
    if kind not in ("auto", "cpu", "gpu") or (asked and (kind != "gpu" or not asked.isdecimal())):
        raise ValueError(f"{rule}, got {number!r}")
    gpus = 0 if kind == "cpu" else torch.cuda.device_count()
    if kind == "gpu":
        wanted = int(asked) if asked else max(gpus, 1)
        if wanted < 1:
            raise ValueError(f"`nproc_per_host` must ask for at least one GPU, got {number!r}")
        if wanted > gpus:
            raise ValueError(
                f"`nproc_per_host` must not ask for more GPUs than there are, {gpus} on this machine, got {number!r}"
            )
        return wanted
    return gpus or len(os.sched_getaffinity(0))
