"""The arguments of ``auto_init_rpc`` → a function that makes the group's transport."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from torch.distributed import rpc

from torchopt_dist.distributed.membership.members import OnLoss
from torchopt_dist.distributed.transport.base import Host, Transport
from torchopt_dist.errors import InitializationError

__all__ = ["NAMES", "VARIABLE", "Choice", "check_name", "choose"]

NAMES = ("auto", "rpc", "zmq")
VARIABLE = "TODIST_TRANSPORT"


@dataclass(frozen=True)
class Choice:
    """A transport that was chosen.

    Attributes:
        make: makes the transport for a group.
        init_method: the address of the workers' store, in torch's notation.
        call_timeout: the default time-out of calls in seconds; 0 means no limit.
        files: the least number of files that a worker opens, without one for each other worker.
    """

    make: Callable[[Host], Transport]
    init_method: str = "env://"
    call_timeout: float = 0.0
    files: int = 64


def choose(
    transport: str | None,
    backend: rpc.BackendType | None,
    options: rpc.RpcBackendOptions | None,
    local_world_size: int,
    on_loss: OnLoss = "end",
) -> Choice:
    """Choose a transport; raises ``InitializationError`` if it is unknown, or cannot be used in this process.

    ``None`` means the environment variable ``TODIST_TRANSPORT``, or ``auto``; that is ``rpc``, or ``zmq`` where lost
    workers are replaced and where torch is built without RPC. ``backend`` and ``options`` are those of
    :func:`torch.distributed.rpc.init_rpc`.
    """
    name = transport or os.environ.get(VARIABLE) or "auto"
    if name not in NAMES:
        raise InitializationError(
            f"the environment variable {VARIABLE} must be {' or '.join(NAMES)}, got {name!r}"
        )
    if name == "auto":
        name = "zmq" if on_loss == "replace" or not rpc.is_available() else "rpc"
    if name == "zmq":
        return _zmq(backend, options)
    if on_loss == "replace":
        raise InitializationError(
            "on_loss='replace' needs transport='zmq', as the groups of torch's RPC take up no new process, got "
            f"transport={name!r} (the environment variable {VARIABLE} chooses where the argument does not)"
        )
    return _rpc(backend, options, local_world_size)


def check_name(transport: str | None) -> None:
    """Raise ``ValueError`` unless there is a transport of that name."""
    if transport is not None and transport not in NAMES:
        raise ValueError(f"transport must be {' or '.join(map(repr, NAMES))}, got {transport!r}")


def _rpc(
    backend: rpc.BackendType | None, options: rpc.RpcBackendOptions | None, local_world_size: int
) -> Choice:
    if not rpc.is_available():
        raise InitializationError(
            "transport='rpc' needs torch's RPC, which this build of torch does not have: choose transport='zmq' (the "
            f"environment variable {VARIABLE} chooses where the argument does not)"
        )
    from torchopt_dist.distributed.transport.rpc import RPCTransport, default_options, rpc_is_initialized

    if rpc_is_initialized():
        raise InitializationError(
            "RPC is already initialized: `auto_init_rpc` calls `torch.distributed.rpc.init_rpc` itself, "
            "so the program must not"
        )
    used = options or default_options(local_world_size)
    # 60 s may be torch's default or the user's wish. They count as the default, which means no time-out.
    timeout = 0.0 if used.rpc_timeout == rpc.constants.DEFAULT_RPC_TIMEOUT_SEC else used.rpc_timeout
    return Choice(lambda host: RPCTransport(host, backend, used), used.init_method, timeout)


def _zmq(backend: rpc.BackendType | None, options: rpc.RpcBackendOptions | None) -> Choice:
    for argument, value in (("backend", backend), ("rpc_backend_options", options)):
        if value is not None:
            raise InitializationError(
                f"{argument} is for torch's RPC, which the transport 'zmq' does not start: leave it out, or choose "
                f"transport='rpc' (the environment variable {VARIABLE} chooses where the argument does not)"
            )
    try:
        from torchopt_dist.distributed.transport.zmq import ZMQTransport
    except ImportError as error:
        raise InitializationError(
            f"transport='zmq' needs pyzmq, which cannot be imported ({error}): pip install 'torchopt_dist[zmq]'"
        ) from error
    return Choice(ZMQTransport, files=12)
