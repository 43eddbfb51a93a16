"""A backend's name, the store of a run → torch's default process group of its workers, and its end."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist

from torchopt_dist.errors import InitializationError

__all__ = ["BACKENDS", "abort_process_group", "begin_process_group", "end_process_group"]

BACKENDS = ("gloo", "nccl", "auto")


def begin_process_group(name: str, store: dist.Store, rank: int, world_size: int, local_rank: int) -> None:
    """Make torch's default process group of all workers of a run.

    Args:
        name: one of :data:`BACKENDS`; ``"auto"`` is NCCL for tensors on GPUs, where there are some, and gloo.
        store: in which no earlier run has written.
        rank: of this worker.
        world_size: how many workers there are.
        local_rank: of this worker on its machine, and of its GPU.

    Raises:
        InitializationError: there is a process group already, or no GPU for NCCL.
    """
    if dist.is_initialized():
        raise InitializationError(
            f"`process_group` must be None where there is a process group already, got {name!r}: leave it out"
        )
    has_gpus = torch.cuda.is_available() and dist.is_nccl_available()
    if name == "nccl" and not has_gpus:
        raise InitializationError("`process_group` must be 'gloo' or 'auto' without a GPU, got 'nccl'")
    backend = name
    if name == "auto":
        backend = "cpu:gloo,cuda:nccl" if has_gpus else "gloo"
    if "nccl" in backend:
        torch.cuda.set_device(local_rank)
    dist.init_process_group(
        backend, store=dist.PrefixStore("process_group", store), rank=rank, world_size=world_size
    )


def end_process_group() -> None:
    """End the process group, unless the program has."""
    if dist.is_initialized():
        dist.destroy_process_group()


def abort_process_group() -> None:
    """Have collectives on GPUs end that wait for a worker that is lost; those of gloo end by themselves."""
    with contextlib.suppress(Exception):  # it is gone, or is broken already
        if dist.is_initialized() and "nccl" in str(dist.get_backend_config()):
            world = dist.group.WORLD
            assert world is not None
            world.abort()
