"""``put(x)`` → a handle that calls take in the place of ``x``: ``x`` is sent to a worker once.

On a worker, and in the caller's own share, the function gets ``x`` itself in the handle's place.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from torchopt_dist.core.random_turns import lent
from torchopt_dist.distributed.group.group import (
    Group,
    answering_group,
    current_group,
    find_group,
    incarnation_of,
)
from torchopt_dist.distributed.messages.payload import Payload
from torchopt_dist.distributed.messages.references import Handle, StayingModule
from torchopt_dist.distributed.messages.requests import Key
from torchopt_dist.errors import ResidentError
from torchopt_dist.pytree._containers import flatten

__all__ = ["Resident", "Shards", "keep_here", "part_of", "resolved"]


class Resident(Handle):
    """The handle of a value that workers keep; made by :func:`put`.

    As an argument of a call, alone or inside a tree or a container, the handle is replaced by the value. Elsewhere,
    such as in a closure, it stays a handle on the worker, too, and ``handle.value`` is the value, as ``to_here()`` and
    ``local_value()`` are, the methods of an RRef. A function may pass
    the handle on in nested calls.

    The workers free the value when the handle is closed or garbage-collected, or when the worker that has put it is
    lost. A worker's copy of the handle is valid until then. What a call with ``retries`` may have to send again keeps
    its handles from being garbage-collected.
    """

    __slots__ = ("__weakref__", "_key", "_release")

    def __init__(self, key: Key) -> None:
        self._key = key
        self._release: weakref.finalize[[Group, Key], Resident] | None = None

    @property
    def value(self) -> Any:
        """The value, as this worker keeps it. It is shared by all that use it: do not change it in place.

        Raises:
            ResidentError: the value has been changed in place, the handle is closed, or the RPC group of ``put`` has
                ended.
            WorkerLostError: the worker that has put it died.
        """
        return _value_on(self, None)

    def local_value(self) -> Any:
        """What :attr:`value` is."""
        return self.value

    def to_here(self, timeout: float = -1.0) -> Any:
        """What :attr:`value` is, however long it takes to come."""
        del timeout
        return self.value

    def close(self) -> None:
        """Free the value on all workers. Closing a worker's copy of the handle has no effect."""
        if self._release is not None:
            self._release()

    def _check_group(self, group: Group | None) -> None:
        if self._release is not None:
            of = self._release.peek()
            if of is not None and of[2][0] is not group:
                raise ResidentError("a resident was used after the RPC group in which it was put had ended")

    def __reduce__(self) -> tuple[Any, ...]:
        group = find_group()
        self._check_group(group)
        home, number = self._key
        if group is not None and (home, incarnation_of(number)) == (group.rank, group.incarnation):
            group.residents.check(self._key)
        return _arrived, (self._key,)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._key[1]} of rank {self._key[0]}>"


def keep_here(value: Any, *, check: bool) -> Resident:
    """Keep a value on this worker, which is its home; see ``put``."""
    group = current_group()
    handle = Resident((group.rank, next(group.numbers)))
    group.residents.put(handle._key, value, check=check)
    handle._release = weakref.finalize(handle, _let_go, group, handle._key)
    handle._release.atexit = False
    return handle


def _value_on(handle: Resident, device: torch.device | None) -> Any:
    """The value on a device; ``None`` leaves its tensors where they are. Errors as for ``handle.value``."""
    group = answering_group()
    handle._check_group(group)
    home, number = key = handle._key
    lives = group.members[home].incarnation == incarnation_of(number)
    if home == group.rank and lives:
        return group.residents.on(key, device)

    def fetch() -> Any:
        if not lives:
            raise group.membership.loss_of(home)
        with lent():
            return group.ask(home, _hand_out, key, group.rank).result()[0]

    return group.residents.on(key, device, fetch)


class Shards:
    """The handles of the parts of a value; made by :func:`put` with a partitioner.

    As an argument of a call it is split as the value would be, and each worker gets the handles of its parts.

    Attributes:
        size: the size of the value along the dimension.
        dim: the dimension that was split.
        selected: whether each part is a single index, and so lacks the dimension.
    """

    __slots__ = ("_parts", "dim", "selected", "size")

    def __init__(self, parts: dict[tuple[int, int], Resident], size: int, dim: int, selected: bool) -> None:
        self._parts = parts  # by their half-open ranges of indices along the dimension
        self.size = size
        self.dim = dim
        self.selected = selected

    def close(self) -> None:
        """Close all handles."""
        for handle in self._parts.values():
            handle.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {len(self._parts)} of size {self.size} along dim={self.dim}>"


def part_of(shards: Shards, start: int, stop: int, dim: int, selected: bool) -> Resident:
    """The handle of one part; raises ``ValueError`` if the value was split into other parts."""
    found = shards._parts.get((start, stop))
    if found is None or (dim, selected) != (shards.dim, shards.selected):
        raise ValueError(
            f"a call needs indices {start} to {stop - 1} along dim={dim} of a value that `put` has split into "
            f"{len(shards._parts)} parts of {shards.size} indices along dim={shards.dim}: give both the same "
            "partitioner"
        )
    return found


def resolved(payload: Payload, device: torch.device | None) -> Payload:
    """The payload with values in the places of handles among its arguments, on a device, if one is given."""
    group = answering_group()
    if not (group.residents.in_use or len(group.mirrors)):
        return payload
    flat = flatten(payload.tasks, is_leaf=_is_whole)
    if not any(isinstance(leaf, (Resident, StayingModule)) for leaf in flat.leaves):
        return payload
    found: dict[Key, Any] = {}
    for leaf in flat.leaves:
        if isinstance(leaf, Resident) and leaf._key not in found:
            found[leaf._key] = _value_on(leaf, device)

    def value_of(leaf: Any) -> Any:
        if isinstance(leaf, Resident):
            return found[leaf._key]
        return leaf.module if isinstance(leaf, StayingModule) else leaf

    return replace(payload, tasks=flat.rebuild(map(value_of, flat.leaves)))


def _is_whole(leaf: Any) -> bool:
    return isinstance(leaf, (Resident, nn.Module))


def _arrived(key: Key) -> Resident:
    """Rebuild a handle from its pickle; from now on this worker searches its calls' arguments for handles."""
    group = find_group()
    if group is not None:
        group.residents.in_use = True
    return Resident(key)


def _hand_out(key: Key, worker: int) -> Any:
    return answering_group().residents.hand_out(key, worker)


def _let_go(group: Group, key: Key) -> None:
    kept = group.residents.release(key)
    for worker in () if kept is None else kept.holders:
        group.releaser.release(group.transport, worker, key)
