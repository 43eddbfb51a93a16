"""A function → one that makes a process group or an RPC group of all workers first, and takes it apart afterwards."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

__all__ = ["check_backend", "in_groups"]

P = ParamSpec("P")
T = TypeVar("T")


def check_backend(backend: str | None) -> None:
    """Hold ``backend`` to what torch knows.

    Raises:
        TypeError: it is no string.
        ValueError: torch knows no such backend.
    """
    if backend is None:
        return
    if not isinstance(backend, str):
        raise TypeError(f"`backend` must be a string or None, got {type(backend).__name__} {backend!r}")
    names = [part.rpartition(":")[2] for part in backend.split(",")]  # as in "cpu:gloo,cuda:nccl"
    known = [name for name in dist.Backend.backend_list if name != "undefined"]
    for name in names:
        if name.lower() not in known:
            raise ValueError(f"`backend` must be made of {', '.join(known)}, got {backend!r}")


def in_groups(func: Callable[P, T], backend: str | None, rpc: bool) -> Callable[P, T]:
    """Have ``func`` called in groups.

    Args:
        func: any function; one that can be pickled still can.
        backend: of the default process group; ``None`` means that none is made.
        rpc: whether to connect the workers for remote calls.
    """
    if backend is not None:
        func = functools.partial(_in_process_group, func, backend)
    if rpc:
        func = functools.partial(_in_rpc_group, func)
    return func


def _in_process_group(func: Callable[..., T], backend: str, /, *args: Any, **kwargs: Any) -> T:
    if "nccl" in backend:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend)
    value = func(*args, **kwargs)
    if dist.is_initialized():  # if it raises, its process ends, and the group with it
        dist.destroy_process_group()
    return value


def _in_rpc_group(func: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
    # By name: this room knows the other only as any user of it does.
    connect: Any = importlib.import_module("torchopt_dist").auto_init_rpc
    value: T = connect()(func)(*args, **kwargs)
    return value
