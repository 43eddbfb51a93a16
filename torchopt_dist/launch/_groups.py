"""A function → one that makes a process group or an RPC group of all workers first, and takes it apart afterwards."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

__all__ = ["check_backend", "in_groups"]

P = ParamSpec("P")
T = TypeVar("T")

connect_rpc: Callable[[], Callable[[Callable[..., Any]], Callable[..., Any]]] | None = None
"""``auto_init_rpc``. The package says so, for this room knows the other only as any user of it does."""


def check_backend(name: str, backend: str) -> None:
    """Refuse a backend that torch does not know.

    Raises:
        ValueError: torch knows no such backend.
    """
    names = [part.rpartition(":")[2] for part in backend.split(",")]  # as in "cpu:gloo,cuda:nccl"
    known = [name for name in dist.Backend.backend_list if name != "undefined"]
    for each in names:
        if each.lower() not in known:
            raise ValueError(f"`{name}` must be made of {', '.join(known)}, got {backend!r}")


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
    assert connect_rpc is not None
    value: T = connect_rpc()(func)(*args, **kwargs)
    return value
