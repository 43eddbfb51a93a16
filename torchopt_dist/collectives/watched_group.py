"""Processes → a process group of theirs, whose collectives end with an error as soon as a member has failed.

A collective of Gloo waits half an hour for a member that has raised an error, since that process lives. So the group is
one of Python's, with torch's inside: who waits looks now and then whether a member is lost, or has said that it has
failed or returned. Teams of workers have such groups, and so do the ranks that run one loop; each has a way of its own
to hear of the others.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torchopt_dist.torch_private import nccl_group

__all__ = [
    "CONNECT_SECONDS",
    "LEFT_SECONDS",
    "PATIENCE",
    "TookTooLongError",
    "WatchedGroup",
    "registered",
    "watched_group",
]

BACKEND = "torchopt_dist_watched"
LOOK = timedelta(seconds=0.5)
"""How long a member waits in a collective before it looks whether the others are still there."""
PATIENCE = timedelta(minutes=30)
"""The limit of a collective, if no other is given: torch's own."""
LEFT_SECONDS = 5.0
"""How long what a member has sent may be on its way after the member has returned."""
CONNECT_SECONDS = 60.0
"""The limit of making a group; all members are known to come by then."""

_COLLECTIVES = (
    *("allreduce", "allreduce_coalesced", "allgather", "allgather_coalesced", "reduce_scatter", "broadcast"),
    *("reduce", "gather", "scatter", "alltoall", "alltoall_base", "barrier", "send", "recv"),
    *("_allgather_base", "_reduce_scatter_base"),
)
"""A group's collectives, as a backend has them."""
_RENAMED = (
    ("all_gather_single", "_allgather_base"),
    ("reduce_scatter_single", "_reduce_scatter_base"),
    ("all_to_all_single", "alltoall_base"),
)
"""The names of newer versions of torch for some of a group's; a backend has the older ones."""
_SCATTERED_SUMS = ("reduce_scatter", "_reduce_scatter_base")
"""Gloo's have an all-reduce inside, for which they wait however short the wait is to be, and are never completed."""


class TookTooLongError(RuntimeError):
    """A member has not come to a collective within the limit."""


class WatchedGroup(dist.ProcessGroup):
    """A process group whose waits end when a member has failed.

    Args:
        rank: this member's rank in the group.
        size: how many members there are.
        number: names the group; its members have the same.
        backends: torch's group for each type of device.
        check: raises an error if a member is lost.
        limit: of a collective.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        number: int,
        backends: dict[str, Any],
        check: Callable[[], object],
        limit: timedelta = PATIENCE,
    ) -> None:
        init: Any = super().__init__
        init(rank, size)  # torch's stubs know another way only
        self.limit = limit
        self.number = number
        self._backends = backends
        self._check = check
        self.has_failed = False
        self.request = 0
        self._name = ""
        self.works: list[Any] = []
        """Collectives of Gloo under way, which have their tensors."""
        self._left: float | None = None

    @property
    def group_name(self) -> Any:
        """See torch, to which a group without backends has no name."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def getBackendName(self) -> str:  # noqa: N802, torch's name
        """See torch."""
        return BACKEND

    @property
    def on_gpus(self) -> bool:
        """Whether the group has tensors on GPUs."""
        return "cuda" in self._backends

    def fail(self) -> None:
        """End the collectives of this member with an error, those that wait and those to come."""
        self.has_failed = True
        backend = self._backends.get("cuda")
        if backend is not None:  # Gloo has nothing to abort
            with suppress(Exception):
                backend.abort()

    def begin(self) -> None:
        """Note that all members begin a request, the next one."""
        self.request += 1
        self._left = None

    def leave(self, request: int) -> None:
        """Note that another member is done with a request: collectives that still wait for it do so in vain."""
        if request == self.request:
            self._left = self._left or time.monotonic()

    def shutdown(self) -> None:
        """Let go of torch's groups. One in which a collective waits is never freed, since it would wait, too."""
        waits = any(not work.is_completed() for work in self.works)
        for backend in self._backends.values() if waits else ():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend))
        self.has_failed = True
        self._backends, self.works = {}, []

    def run(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Begin a collective on the device of its tensors; returns torch's ``Work``."""
        self.check()
        device = next((tensor.device.type for tensor in _tensors(args)), "cpu")
        backends = self._backends
        backend = backends.get(device) or backends["cpu"]
        if not isinstance(backend, dist.ProcessGroupGloo):
            return getattr(backend, name)(*args, **kwargs)
        if name in _SCATTERED_SUMS:
            return self._scattered_sums(backend, *args, **kwargs)
        return self._watched(getattr(backend, name)(*args, **kwargs))

    def _watched(self, work: Any, finish: Callable[[], object] | None = None) -> _Watched:
        self.works.append(work)
        return _Watched(work, self, finish)

    def _scattered_sums(self, gloo: Any, own: Any, all_rows: Any, opts: Any = None) -> Any:
        """A reduce-scatter, as an all-reduce of which each member takes its rows."""
        if torch.is_tensor(own):
            rows = all_rows.reshape(-1).chunk(self.size())
        else:
            (own,), (rows,) = own, all_rows
        flat = torch.cat([row.reshape(-1) for row in rows])
        begin = sum(row.numel() for row in rows[: self.rank()])
        options = dist.AllreduceOptions()
        if opts is not None:
            options.reduceOp, options.timeout = opts.reduceOp, opts.timeout
        work = gloo.allreduce([flat], options)
        return self._watched(work, lambda: own.copy_(flat[begin : begin + own.numel()].view_as(own)))

    def check(self) -> None:
        """Raise an error if a member is lost or has failed."""
        self._check()
        if self.has_failed:
            raise RuntimeError("a member has failed")
        if self._left is not None and time.monotonic() - self._left > LEFT_SECONDS:
            raise RuntimeError("another member has returned, and takes part in no more collectives")


def _collective(method: str) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: self.run(method, *args, **kwargs)


for _name, _method in (*((_name, _name) for _name in _COLLECTIVES), *_RENAMED):
    setattr(WatchedGroup, _name, _collective(_method))


class _Watched(dist.Work):
    """A collective under way, whose wait ends when a member is lost."""

    def __init__(self, work: Any, group: WatchedGroup, finish: Callable[[], object] | None) -> None:
        super().__init__()
        self._work = work
        self._group = group
        self._finish = finish

    def wait(self, timeout: timedelta | None = None) -> bool:
        """See torch."""
        limit = timeout or self._group.limit
        end = time.monotonic() + limit.total_seconds()
        while not self._work.is_completed():
            with suppress(RuntimeError):  # also if it is only not there yet
                return self._waited(min(LOOK, limit))
            self._group.check()
            if time.monotonic() > end:
                raise TookTooLongError(f"a collective has taken {limit}, the time-out of its group")
        return self._waited(LOOK)

    def _waited(self, limit: timedelta) -> bool:
        is_done = bool(self._work.wait(limit))
        works = self._group.works
        works[:] = [work for work in works if work is not self._work and not work.is_completed()]
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        return is_done

    def is_completed(self) -> bool:
        """See torch."""
        is_completed = bool(self._work.is_completed())
        if is_completed and self._finish is not None:
            with suppress(RuntimeError):  # which the next wait raises
                self._waited(LOOK)
        return is_completed


def watched_group(
    rank: int,
    size: int,
    number: int,
    store: dist.Store,
    check: Callable[[], object],
    limit: timedelta = PATIENCE,
    *,
    on_gpus: bool | None = None,
) -> WatchedGroup:
    """The group of which this process is the member ``rank``; all members call this at the same time.

    Args:
        rank: this member's rank in the group.
        size: how many members there are.
        number: names the group; its members have the same.
        store: where they meet; nobody else uses it.
        check: raises an error if a member is lost.
        limit: of a collective.
        on_gpus: whether NCCL has the tensors on GPUs; ``None`` if torch's default group has it for them.
    """
    own = limit + LOOK + LOOK  # torch's errors name nobody, and NCCL's end the process
    gloo = dist.ProcessGroupGloo(
        dist.PrefixStore("cpu", store), rank, size, timedelta(seconds=CONNECT_SECONDS)
    )
    gloo._set_default_timeout(own)
    backends: dict[str, Any] = {"cpu": gloo}
    if on_gpus is None:
        on_gpus = torch.cuda.is_available() and "nccl" in dist.get_backend_config()
    if on_gpus:
        backends["cuda"] = nccl_group(dist.PrefixStore("cuda", store), rank, size, own)
    return WatchedGroup(rank, size, number, backends, check, limit)


def registered(ranks: Sequence[int], make: Callable[[int, int], WatchedGroup]) -> WatchedGroup:
    """A group as one of torch's, which functions of ``torch.distributed`` take.

    Args:
        ranks: of its members in the default group, in ascending order; each calls this.
        make: makes the group by this member's rank and the number of members.
    """
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, _made, extended_api=True, devices=["cpu", "cuda"])
    options: Any = make
    # As of members alone, since torch names others by how many this process has made.
    made: Any = dist.new_group(
        list(ranks), backend=BACKEND, pg_options=options, use_local_synchronization=True
    )
    assert isinstance(made, WatchedGroup)
    return made


def _made(options: Any, make: Callable[[int, int], WatchedGroup]) -> WatchedGroup:
    return make(options.group_rank, options.group_size)


def _tensors(args: Any) -> Iterator[torch.Tensor]:
    for each in args:
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, (list, tuple)):
            yield from _tensors(each)
