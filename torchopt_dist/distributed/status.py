"""The RPC group → what each of its workers holds and waits for right now: requests, kept graphs, residents, memory."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from torchopt_dist.distributed.group.group import Group, answering_group, current_group
from torchopt_dist.distributed.worker.handler import tasks_under_way
from torchopt_dist.errors import CallTimeoutError, TodistError
from torchopt_dist.process.future import Future
from torchopt_dist.process.table import bytes_text, table

__all__ = ["Status", "WorkerStatus", "status"]


@dataclass(frozen=True)
class WorkerStatus:
    """What a worker holds and waits for.

    Attributes:
        rank: its rank.
        name: its name.
        host: the host it runs on.
        state: ``"alive"``, ``"silent"`` if it has not answered in time, or ``"lost"``; in the last two cases nothing
            else is known.
        process: the id of its process.
        incarnation: how often its rank was lost and given to a new process (``on_loss="replace"``).
        requests: how many of its own requests wait for a reply; that of ``status`` is not counted.
        waits_for: how many of them, by the name of the worker that owes the reply.
        tasks: of each task that runs there the function, and the line of the program where it is, such as
            ``"slow (prog.py:12)"``; of a backward ``"backward"`` in the function's place. Several processes may have
            the same file in other folders, so it has none. A task that is in C code is at the line that called it.
        kept_graphs: how many graphs of calls it keeps for backward.
        residents: how many values of :func:`put` and :func:`mirror` it holds.
        resident_bytes: bytes of these values' tensors.
        memory: bytes of memory that its process occupies.
        gpu_memory: bytes of tensors on its current GPU; 0 where no GPU is in use.
    """

    rank: int
    name: str
    host: str
    state: str
    process: int = 0
    incarnation: int = 0
    requests: int = 0
    waits_for: Mapping[str, int] = field(default_factory=dict)
    tasks: tuple[str, ...] = ()
    kept_graphs: int = 0
    residents: int = 0
    resident_bytes: int = 0
    memory: int = 0
    gpu_memory: int = 0


class Status(tuple[WorkerStatus, ...]):
    """A :class:`WorkerStatus` for each worker, by rank; ``print`` shows a table, and who waits and runs what."""

    __slots__ = ()

    def __str__(self) -> str:
        states = {worker.rank: worker.state for worker in self}
        for worker in self:
            if worker.incarnation:
                states[worker.rank] += f", process {worker.incarnation + 1}"
        header = ["worker", "host", "state", "requests", "kept graphs", "residents", "memory", "GPU memory"]
        rows = [
            [worker.name, worker.host, states[worker.rank]]
            if worker.state != "alive"
            else [
                worker.name,
                worker.host,
                states[worker.rank],
                str(worker.requests),
                str(worker.kept_graphs),
                f"{worker.residents} ({bytes_text(worker.resident_bytes)})",
                bytes_text(worker.memory),
                bytes_text(worker.gpu_memory),
            ]
            for worker in self
        ]
        lines = [table(header, rows, left=3)]
        for worker in self:
            doing = {"waits for": worker.waits_for, "runs": Counter(worker.tasks)}
            told = [f"{verb} {_listed(counts)}" for verb, counts in doing.items() if counts]
            if told:
                lines.append(f"{worker.name} {' and '.join(told)}")
        return "\n".join(lines)


def status(timeout: float = 5.0) -> Status:
    """Ask every worker what it holds and waits for.

    This helps to find out why a program hangs, is slow, or its memory grows: a kept graph belongs to a call whose
    results still have a graph, and a request that stays belongs to a call that is not answered. If ``main`` waits for
    that call, ask from another thread: ``threading.Timer(60, lambda: print(todist.status())).start()`` before it.

    Args:
        timeout: seconds after which a worker that has not answered is reported as silent. A worker answers while its
            own ``main`` is busy, but not while C code holds Python's global interpreter lock.

    Returns:
        The status of each worker, by rank.

    Raises:
        NotInitializedError: there is no RPC group, or this process was forked from a worker of it.
        ValueError: ``timeout`` is not positive.

    Example::

        print(todist.status())
    """
    if not timeout > 0:
        raise ValueError(f"timeout must be above 0 seconds, got {timeout!r}")
    group = current_group()
    group.check_process()
    own = _own(group)
    asked: dict[int, Future[list[Any]]] = {}
    for rank in range(len(group.names)):
        if rank != group.rank and rank not in group.lost:
            with suppress(TodistError):
                asked[rank] = group.ask(rank, _here, seconds=timeout)
    found = []
    for member in group.members:
        state, told = "alive", own
        if member.rank != group.rank:
            state, told = "lost", {}
            try:
                if member.rank in asked:
                    (told,) = asked[member.rank].result()
                    state = "alive"
            except CallTimeoutError:
                state = "silent"
            except TodistError:
                pass
        found.append(
            WorkerStatus(member.rank, member.name, member.host, state, incarnation=member.incarnation, **told)
        )
    return Status(found)


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(each if count == 1 else f"{each} {count} times" for each, count in counts.items())


def _here() -> dict[str, Any]:
    return _own(answering_group())


def _own(group: Group) -> dict[str, Any]:
    waits_for = {group.names[worker]: count for worker, count in group.transport.unanswered().items()}
    held: list[Any] = [*group.residents.values(), *group.mirrors.values()]
    return {
        "process": os.getpid(),
        "requests": sum(waits_for.values()),
        "waits_for": waits_for,
        "tasks": tasks_under_way(),
        "kept_graphs": len(group.kept_graphs),
        "residents": len(held),
        "resident_bytes": sum(tensor.nbytes for each in held for tensor in each.tensors),
        "memory": _memory(),
        "gpu_memory": torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0,
    }


def _memory() -> int:
    """Bytes of memory that this process occupies; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
