"""Environment variables, torchrun's or another launcher's → this process's place in the world; of one, without them.

Where a launcher does not say which tasks share a machine, the workers count the names of their machines as they meet.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist

from torchopt_dist.distributed.rendezvous.sealed_store import SealedStore
from torchopt_dist.errors import InitializationError
from torchopt_dist.process.launchers import NAMES, find_task

__all__ = [
    "WorldInfo",
    "all_on_one_machine",
    "count_machines",
    "default_worker_name_format",
    "knows_its_machine",
    "read_world",
    "torchrun_variables",
]


def default_worker_name_format(
    *, world_rank: int, world_size: int, local_rank: int, local_world_size: int
) -> str:
    """Name a worker by its rank: ``worker0``, ``worker1``, …"""
    del world_size, local_rank, local_world_size
    return f"worker{world_rank}"


@dataclass(frozen=True)
class WorldInfo:
    """This process's place in the world.

    Attributes:
        world_size: number of workers on all machines.
        world_rank: this worker's number, in ``[0, world_size)``; worker 0 drives the program.
        local_world_size: number of workers on this machine.
        local_rank: this worker's number on this machine, in ``[0, local_world_size)``; choose the GPU by it.
        worker_name: the name that remote calls know this worker by.
    """

    world_size: int
    world_rank: int
    local_world_size: int
    local_rank: int
    worker_name: str

    @property
    def rank(self) -> int:
        """The same as ``world_rank``."""
        return self.world_rank


def read_world() -> WorldInfo:
    """This process's place in the world, with the default name; raises ``InitializationError`` for a bad variable."""
    env: Mapping[str, str] = os.environ
    task = find_task(env)
    if task is not None:
        env = {**task.variables(), **env}
    if "RANK" not in env and "WORLD_SIZE" not in env:
        world_size, world_rank, local_world_size, local_rank = 1, 0, 1, 0
    else:
        world_size, world_rank = _read("WORLD_SIZE", env), _read("RANK", env)
        local_world_size = _read("LOCAL_WORLD_SIZE", env, world_size)
        local_rank = _read("LOCAL_RANK", env, world_rank % max(local_world_size, 1))
        _check_range("RANK", world_rank, "WORLD_SIZE", world_size)
        _check_range("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_world_size)
    name = default_worker_name_format(
        world_rank=world_rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
    )
    return WorldInfo(world_size, world_rank, local_world_size, local_rank, name)


@contextmanager
def torchrun_variables() -> Iterator[None]:
    """A context in which torchrun's variables are set, where another launcher has started several tasks.

    So :func:`torch.distributed.init_process_group` works, too. Afterwards those that were not there before are removed,
    those of :func:`count_machines` among them.
    """
    missing = [name for name in NAMES if name not in os.environ]
    task = find_task()
    if task is not None:
        os.environ.update({**task.variables(), **os.environ})
    is_task = "RANK" in os.environ
    try:
        yield
    finally:
        for name in missing if is_task else ():
            os.environ.pop(name, None)


def knows_its_machine() -> bool:
    """Whether the environment says which workers share this machine, or there is one worker only."""
    return "LOCAL_WORLD_SIZE" in os.environ or "LOCAL_RANK" in os.environ or read_world().world_size == 1


def count_machines(store: SealedStore, world: WorldInfo) -> WorldInfo:
    """The world, where this worker's local rank is that among the workers on machines of the same name.

    All workers leave the names of their machines in the store. Where :func:`knows_its_machine` is true, the world is
    returned as it is. Otherwise LOCAL_RANK and LOCAL_WORLD_SIZE are set.

    Raises ``InitializationError`` if the others' names do not come in time.
    """
    store.tell(f"host name/{world.rank}", socket.gethostname())
    if knows_its_machine():
        return world
    try:
        machines = store.told(*(f"host name/{rank}" for rank in range(world.world_size)))
    except dist.DistError as error:
        raise InitializationError(
            f"rank {world.rank} did not hear which machines the others are on: {error}"
        ) from error
    here = [rank for rank, machine in enumerate(machines) if machine == machines[world.rank]]
    os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = str(here.index(world.rank)), str(len(here))
    return read_world()


def all_on_one_machine() -> bool:
    """Whether the environment says that there are several workers, all of them on this machine."""
    world = read_world()
    return 1 < world.world_size == world.local_world_size and "LOCAL_WORLD_SIZE" in os.environ


def _read(variable: str, env: Mapping[str, str], default: int | None = None) -> int:
    text = env.get(variable)
    if text is None:
        if default is None:
            raise InitializationError(
                f"the environment variable {variable} is missing: RANK and WORLD_SIZE are set together "
                "(by torchrun, for example) or not at all"
            )
        return default
    try:
        return int(text)
    except ValueError:
        raise InitializationError(
            f"the environment variable {variable} must be an integer, got {text!r}"
        ) from None


def _check_range(rank_variable: str, rank: int, size_variable: str, size: int) -> None:
    if not 0 <= rank < size:
        raise InitializationError(
            f"{rank_variable} must be in [0, {size_variable}), got {rank_variable}={rank} "
            f"and {size_variable}={size}"
        )
