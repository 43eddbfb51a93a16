"""Processes of torch that work together: time-outs, transports, contexts of gradients, messages of the C++ code."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import rpc

from torchopt_dist.torch_private.lookup import find

F = TypeVar("F")

CPP_LIBRARY = "libc10.dylib" if sys.platform == "darwin" else "libc10.so"


def set_cpp_log_level(level: int) -> int | None:
    """Let torch's C++ code print messages of that level and above: 0 information, 1 warnings, 2 errors.

    Returns:
        The level before; ``None`` where it cannot be read: then nothing changes.
    """
    try:
        # Private: torch reads TORCH_CPP_LOG_LEVEL when it is imported, and never again. Without: warnings are printed.
        library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / CPP_LIBRARY))
        found = ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        return None
    before, found.value = found.value, level
    return before


def set_default_rpc_timeout(seconds: float) -> None:
    """Set the time-out of the program's own ``rpc_sync`` and ``rpc_async`` in the RPC group that is running.

    Without the name they keep the time-out that the group was started with; torchopt_dist's calls name their own.
    """
    set_timeout = getattr(rpc, "_set_rpc_timeout", None)
    if set_timeout is not None:
        set_timeout(seconds)


def set_failure(
    future: torch.futures.Future[Any], failure: F, unwrap: Callable[[F], NoReturn], error: Exception
) -> None:
    """Let a future hold an object, from which its waits get the exception to raise.

    Without the name it holds the exception itself.

    Args:
        future: the future.
        failure: the object.
        unwrap: raises the exception of the object.
        error: the exception.
    """
    set_unwrap = getattr(future, "_set_unwrap_func", None)
    if set_unwrap is None:
        torch.futures.Future.set_exception(future, error)
        return
    set_unwrap(unwrap)
    future.set_result(failure)


def init_distributed_autograd(rank: int) -> None:
    """Let this process have contexts of ``torch.distributed.autograd``, as ``init_rpc`` does where torch's RPC runs.

    Without the name ``todist.autograd.context()`` is an error of torch's where calls go over another transport.
    """
    init = find("_C._distributed_autograd._init")
    if init is not None:
        with suppress(RuntimeError):  # this process had another rank before, as it may not
            init(rank)


def nccl_group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupNCCL:
    """A process group over NCCL; without the name its time-out is torch's own.

    Args:
        store: where its members meet.
        rank: this process's rank among them.
        size: how many there are.
        timeout: for each of its collectives.
    """
    options = dist.ProcessGroupNCCL.Options()
    if hasattr(options, "_timeout"):
        options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


def time_out_of(group: dist.ProcessGroup, otherwise: timedelta) -> timedelta:
    """How long a collective of a process group may take; the shortest, if that differs by the type of device.

    Args:
        group: the process group.
        otherwise: without the names, and for a backend that does not tell.
    """
    found = []
    for device in getattr(group, "_device_types", ()):
        with suppress(AttributeError, RuntimeError, TypeError):
            found.append(group._get_backend(device).options._timeout)
    return min((one for one in found if isinstance(one, timedelta)), default=otherwise)


def tensorpipe_options_with_sockets() -> rpc.TensorPipeRpcBackendOptions:
    """Options of an RPC group whose workers speak through sockets only, not through shared memory.

    Without the name they are torch's default options: waiting workers keep cores busy, and beyond some forty workers on
    one machine the group does not start.
    """
    try:
        return rpc.TensorPipeRpcBackendOptions(_transports=["uv"])
    except TypeError:
        return rpc.TensorPipeRpcBackendOptions()
