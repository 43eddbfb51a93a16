"""Environment variables, as torchrun sets them → this process's place in the world; without them, a world of one."""

from __future__ import annotations

import os
from dataclasses import dataclass

from torchopt_dist.errors import InitializationError

__all__ = ["WorldInfo", "all_on_one_machine", "default_worker_name_format", "read_world"]


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
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        world_size, world_rank, local_world_size, local_rank = 1, 0, 1, 0
    else:
        world_size, world_rank = _read("WORLD_SIZE"), _read("RANK")
        local_world_size = _read("LOCAL_WORLD_SIZE", world_size)
        local_rank = _read("LOCAL_RANK", world_rank % max(local_world_size, 1))
        _check_range("RANK", world_rank, "WORLD_SIZE", world_size)
        _check_range("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_world_size)
    name = default_worker_name_format(
        world_rank=world_rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
    )
    return WorldInfo(world_size, world_rank, local_world_size, local_rank, name)


def all_on_one_machine() -> bool:
    """Whether the environment says that there are several workers, all of them on this machine."""
    world = read_world()
    return 1 < world.world_size == world.local_world_size and "LOCAL_WORLD_SIZE" in os.environ


def _read(variable: str, default: int | None = None) -> int:
    text = os.environ.get(variable)
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
