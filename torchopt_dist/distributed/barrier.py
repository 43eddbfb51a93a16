"""Names of workers → a wait that ends when all of them have called it."""

from __future__ import annotations

from collections.abc import Iterable

from torchopt_dist.distributed.group.group import current_group
from torchopt_dist.distributed.world import get_worker_id

__all__ = ["barrier"]


def barrier(worker_names: Iterable[str] | None = None) -> None:
    """Wait until every worker, or every named one, has called ``barrier`` with the same names.

    Args:
        worker_names: the workers to wait for, by name or rank, this one among them; ``None`` means all.

    Raises:
        NotInitializedError: there is no RPC group, or this process was forked from a worker of it.
        ValueError: a name is unknown, or this worker is not among them.
        PeerFailedError: another rank failed meanwhile.
        WorkerLostError: a worker that is waited for died.
    """
    group = current_group()
    group.check_process()
    if isinstance(worker_names, str):
        raise TypeError(
            f"worker_names must be a collection of names, got one string: write [{worker_names!r}]"
        )
    if not isinstance(worker_names, (Iterable, type(None))):
        raise TypeError(
            f"worker_names must be a collection of names, got {type(worker_names).__name__} {worker_names!r}"
        )
    chosen = range(len(group.names)) if worker_names is None else tuple(worker_names)
    if None in chosen:
        raise TypeError(f"worker_names must hold names, got None in {chosen}")
    ranks = [get_worker_id(name) for name in chosen]
    if group.rank not in ranks:
        raise ValueError(
            f"worker_names must contain the calling worker {group.names[group.rank]!r}, "
            f"got {[group.names[rank] for rank in ranks]}"
        )
    group.membership.barrier(ranks)
