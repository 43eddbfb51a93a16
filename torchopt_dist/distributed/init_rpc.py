"""``main`` → the same in an RPC group: init → ``worker_init_fn()`` → barrier → ``main()`` → shutdown → its value.

``life/running_group.py`` makes and ends the group.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable
from typing import Any, Literal, ParamSpec, TypeVar

from torch.distributed import rpc

from torchopt_dist.arguments.options import decorated_alone
from torchopt_dist.distributed.group.group import find_group
from torchopt_dist.distributed.life.process_group import BACKENDS
from torchopt_dist.distributed.life.running_group import RunningGroup
from torchopt_dist.distributed.membership.members import OnLoss
from torchopt_dist.distributed.messages.caller_state import ThreadSettings
from torchopt_dist.distributed.rendezvous import store
from torchopt_dist.distributed.rendezvous.environment import torchrun_variables
from torchopt_dist.distributed.rendezvous.store import GroupEndedError
from torchopt_dist.distributed.transport.choice import check_name
from torchopt_dist.distributed.world import CONNECTS, default_worker_name_format
from torchopt_dist.errors import InitializationError
from torchopt_dist.process.liveness import Liveness

__all__ = ["auto_init_rpc"]

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger(__name__)


def auto_init_rpc(
    worker_init_fn: Callable[[], Any] | None = None,
    worker_name_format: Callable[..., str] = default_worker_name_format,
    *,
    transport: Literal["auto", "rpc", "zmq"] | None = None,
    backend: rpc.BackendType | None = None,
    rpc_backend_options: rpc.RpcBackendOptions | None = None,
    on_loss: OnLoss = "end",
    liveness: Liveness | None = None,
    process_group: Literal["gloo", "nccl", "auto"] | None = None,
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate ``main()`` so that it runs on every worker, with remote calls between them.

    Started by torchrun, by anything else that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or by srun, mpirun or
    jsrun, the workers first wait for each other; while ``main`` runs, these variables are set. Started by plain
    ``python``, the world is one process. A second call
    inside ``main`` uses the group that is there; a call after ``main`` has returned makes a new one.

    Args:
        worker_init_fn: called on every worker before ``main`` runs on any worker, to set seeds, devices or a process
            title. The default device and the current GPU that it sets hold in all threads that answer calls, too.
        worker_name_format: called with the keywords ``world_rank``, ``world_size``, ``local_rank`` and
            ``local_world_size``; returns this worker's name, of letters, digits, ``-``, ``_`` and ``:``.
        transport: how messages travel: ``"rpc"`` is torch's RPC, ``"zmq"`` is ZeroMQ and needs the extra ``zmq``.
            ``"auto"`` is ``"zmq"`` with ``on_loss="replace"``, and where torch is built without RPC, else ``"rpc"``.
            ``None`` takes the environment variable ``TODIST_TRANSPORT``, or ``"auto"`` if that is not set.
        backend: as in :func:`torch.distributed.rpc.init_rpc`; of the transport ``"rpc"`` only.
        rpc_backend_options: as in :func:`torch.distributed.rpc.init_rpc`; of the transport ``"rpc"`` only. Device maps
            are set here. Calls have no time-out unless ``rpc_timeout`` (seconds) differs from torch's default of 60.
        on_loss: what happens when a worker is lost, for example killed. ``"end"`` ends all the others with a
            ``WorkerLostError``, as if ``main`` had raised there. With ``"continue"`` they go on: calls to the lost
            worker raise ``WorkerLostError``, barriers do not wait for it, :func:`alive` tells who is left, and the
            program succeeds if ``main`` returns. With ``"replace"`` they go on, too, and the launcher starts a new
            process for the lost rank: it runs ``worker_init_fn`` and ``main``, and takes part in calls again. That
            needs ``transport="zmq"``, which is the default then, and ``todist.launch(..., on_loss="replace")``. The
            loss of rank 0 ends all workers in every case.
        liveness: after how long a worker that is stopped or cannot be reached counts as lost; one that has died is
            noticed at once. ``None`` takes the environment variable ``TODIST_LIVENESS``; if that is not set, the
            patience is 10 s.
        process_group: also make torch's default process group of all workers, before ``worker_init_fn``, and end it
            after the last call is answered: for ``inner_loop(..., parallel=...)`` and torch's collectives. ``"auto"``
            is NCCL for tensors on GPUs, where there are some, and gloo. NCCL's worker uses the GPU of its local rank.

    Returns:
        The decorator. The decorated function returns what ``main`` returns.

    Raises:
        InitializationError: the group cannot be formed; raised by the decorated function.
        ValueError: there is no such transport or process group; or ``process_group`` is given, and ``on_loss`` is not
            ``"end"``.
        PeerFailedError: ``main`` or ``worker_init_fn`` raised on another rank; its traceback is in the message. It is
            raised inside ``main`` if ``main`` runs Python code at that time; its ``finally`` blocks then have 5 s.
        WorkerLostError: another rank was lost; it is raised inside ``main`` in the same way.
    """
    if (alone := decorated_alone(auto_init_rpc, worker_init_fn)) is not None:
        return alone
    for argument, value in (("worker_init_fn", worker_init_fn), ("worker_name_format", worker_name_format)):
        if value is not None and not callable(value):
            raise TypeError(f"{argument} must be callable, got {type(value).__name__} {value!r}")
    if on_loss not in ("end", "continue", "replace"):
        raise ValueError(f"on_loss must be 'end', 'continue' or 'replace', got {on_loss!r}")
    check_name(transport)
    if not isinstance(liveness, (Liveness, type(None))):
        raise TypeError(f"liveness must be a todist.Liveness, got {type(liveness).__name__} {liveness!r}")
    if process_group not in (None, *BACKENDS):
        raise ValueError(f"process_group must be 'gloo', 'nccl', 'auto' or None, got {process_group!r}")
    if process_group is not None and on_loss != "end":
        raise ValueError(
            "on_loss must be 'end' with process_group, which a lost worker breaks and no new one can join, got "
            f"{on_loss!r}"
        )
    settings = (
        worker_name_format,
        transport,
        backend,
        rpc_backend_options,
        on_loss,
        liveness,
        process_group,
    )

    def decorator(main: Callable[P, T]) -> Callable[P, T]:
        if not callable(main):
            raise TypeError(f"auto_init_rpc decorates a function, got {type(main).__name__} {main!r}")

        # A decorated function that is decorated again, as by `launch(main, rpc=True)`, is prepared as it asks.
        prepare = worker_init_fn or getattr(main, CONNECTS, None)

        @functools.wraps(main)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
            group = find_group()
            if group is not None:
                _check_same(group.settings, settings)
                if worker_init_fn not in (None, group.prepared_by):
                    name = getattr(main, "__qualname__", "main")
                    warnings.warn(
                        f"`worker_init_fn` of the decorated `{name}` is not called, since the group is there already: "
                        "give it to the `auto_init_rpc` that comes first, or `launch` the decorated function itself",
                        stacklevel=2,
                    )
                return main(*args, **kwargs)
            with torchrun_variables():
                running = RunningGroup(*settings)
                try:
                    with running.termination, running as group, running.parent_watch, running.interruption:
                        group.prepared_by = prepare
                        if prepare is not None:
                            prepare()
                            chosen = ThreadSettings.capture()
                            if chosen.are_chosen():
                                group.threads.prepare = chosen.apply
                        group.membership.start(store.init_timeout())
                        return main(*args, **kwargs)
                except GroupEndedError as ended:
                    log.info("this process replaces a lost worker, and there is nothing to do: %s", ended)
                    raise SystemExit(0) from None

        vars(wrapped)[CONNECTS] = prepare
        return wrapped

    return decorator


def _check_same(here: tuple[Any, ...], asked: tuple[Any, ...]) -> None:
    """Raise if a setting is given that differs from the running group's."""
    names = (
        "worker_name_format",
        "transport",
        "backend",
        "rpc_backend_options",
        "on_loss",
        "liveness",
        "process_group",
    )
    for name, its, wanted in zip(names, here, asked, strict=True):
        whatever = "auto" if name == "transport" else None
        if wanted not in (its, whatever, None, default_worker_name_format, "end"):
            raise InitializationError(
                f"a second `auto_init_rpc` inside `main` uses the group that is there, but asks for another "
                f"{name}: {wanted!r}, where the group has {its!r}"
            )
