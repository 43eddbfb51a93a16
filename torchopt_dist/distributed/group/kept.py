"""Key → what a worker keeps between calls: graphs, values that were put, mirrors. Others hold the keys.

A handle is sent instead of a value: a worker that gets a handle for the first time fetches the value from its home, and
keeps it until the home frees it.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from torchopt_dist.core.inputs import Seen
from torchopt_dist.core.random_turns import lent
from torchopt_dist.distributed.messages.requests import BACKWARD_TWICE, Key
from torchopt_dist.distributed.serialization.pickling import pack, unpack
from torchopt_dist.errors import ResidentError

__all__ = ["HeldLeaf", "Kept", "KeptGraph", "Residents", "graph_missing"]


GIVEN_UP = 1 << 12
"""How many keys are remembered that were released before their graphs were there. Most never come: a function has
raised an error, or another worker was sooner done."""

T = TypeVar("T")


class Kept(Generic[T]):
    """What a worker keeps, by key, until it is released or its owner is gone; all of it ends with the worker's group.

    ``missing`` makes the error for a key under which nothing is kept; ``has_gone`` tells whether the process that has
    made a key is known to have ended, so that it releases nothing any more.
    """

    def __init__(
        self, missing: Callable[[], Exception], has_gone: Callable[[Key], bool] = lambda _: False
    ) -> None:
        self._missing = missing
        self._has_gone = has_gone
        self._kept: dict[Key, T] = {}
        self._given_up: dict[Key, None] = {}  # the last ones, the oldest first
        self._lock = threading.RLock()  # a finalizer may release a key while its thread is at work here

    def __len__(self) -> int:
        return len(self._kept)

    def values(self) -> list[T]:
        """All that is kept."""
        with self._lock:
            return list(self._kept.values())

    def keep(self, key: Key, value: T) -> None:
        """Keep a value, unless its key was released, or its owner was lost, before the value was there."""
        with self._lock:
            if key in self._given_up:
                del self._given_up[key]
            elif not self._has_gone(key):
                self._kept[key] = value

    def find(self, key: Key) -> T:
        """What is kept under a key; raises the error of ``missing`` if there is nothing."""
        with self._lock:
            found = self._kept.get(key)
        if found is None:
            raise self._missing()
        return found

    def release(self, key: Key, *, coming: bool = False) -> T | None:
        """Forget what is kept under a key, and return it; ``coming``: also what is still to come."""
        with self._lock:
            found = self._kept.pop(key, None)
            if found is None and coming:
                self._given_up[key] = None
                if len(self._given_up) > GIVEN_UP:
                    del self._given_up[next(iter(self._given_up))]
        return found

    def forget_owner(self, rank: int) -> None:
        """Forget what a worker that is lost would have released."""
        with self._lock:
            for key in [key for key in self._kept if key[0] == rank]:
                del self._kept[key]

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._kept.clear()
            self._given_up.clear()


class HeldLeaf(NamedTuple):
    """Why the gradient of a graph's leaf stays on this worker: the leaf stands for a tensor of the mirror ``held``.

    ``hook`` is the index of the graph's input that the caller's graph has in its place, ``place`` that of the tensor
    in the mirror.
    """

    hook: int
    held: Any
    place: int


@dataclass
class KeptGraph:
    """The graph of a call, or of a backward that is itself to be differentiated.

    Attributes:
        inputs: its leaves, those of ``held`` the last.
        outputs: the tensors that were sent from it; ``None`` for one that a backward has used up.
        shared: whether the graph of a recorded backward has nodes in common with it. A backward through one of the two
            then retains these, whatever its caller asks; they are freed when both graphs are forgotten.
        end: a sequence number above those of its nodes.
        held: what the last leaves are whose gradients stay on this worker.
        within: makes the context of a backward.
    """

    inputs: list[torch.Tensor]
    outputs: list[Any]
    shared: bool = False
    end: int = 0
    held: Sequence[HeldLeaf] = ()
    within: Callable[[], AbstractContextManager[object]] = nullcontext

    def use_up(self, places: list[int]) -> bool:
        """Forget some outputs; returns whether these were the last."""
        for place in places:
            self.outputs[place] = None
        return all(output is None for output in self.outputs)


def graph_missing() -> Exception:
    """The error where a graph is not kept any more: backwards have used it up."""
    return RuntimeError(BACKWARD_TWICE)


@dataclass
class _KeptValue:
    """A value, the tensors in it, and a snapshot of how these were when it was put or received.

    ``digest`` is of all its bytes, ``None`` if these are not compared; ``holders`` are, at its home, the workers that
    have fetched it; ``placed`` are copies on other devices.
    """

    value: Any
    tensors: list[torch.Tensor]
    snapshot: Seen
    digest: bytes | None = None
    holders: set[int] = field(default_factory=set)
    placed: dict[torch.device, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Raise if the value has been changed in place."""
        changed = bool(self.snapshot.changed())
        if changed or (self.digest is not None and _digest(self.value) != self.digest):
            what = _described(self.value)
            raise ResidentError(
                f"a resident, {what}, was changed in place after `todist.put`, so workers have what it was before: "
                "put what it is now, and let functions work on a clone"
            )

    def on(self, device: torch.device | None) -> Any:
        """The value with its tensors on a device, copied there once."""
        if device is None or all(tensor.device == device for tensor in self.tensors):
            return self.value
        if device not in self.placed:
            self.placed[device] = unpack(pack(self.value, main_by_name=True).detached().received(device))
        return self.placed[device]


class Residents(Kept[_KeptValue]):
    """The values that stay on a worker; ``in_use``: there has been a handle, so calls must search for handles."""

    def __init__(self, has_gone: Callable[[Key], bool]) -> None:
        super().__init__(_missing, has_gone)
        self.in_use = False
        self._coming: dict[Key, Future[_KeptValue]] = {}

    def put(self, key: Key, value: Any, *, check: bool) -> None:
        """Keep a value of this worker's own; raises :class:`ValueError` if a tensor in it requires grad."""
        kept = _kept(value)
        for tensor in kept.tensors:
            if tensor.requires_grad:
                raise ValueError(
                    f"`put` keeps constants on workers, got a tensor of shape {tuple(tensor.shape)} that requires "
                    "grad: pass it to the call as it is, or put a detached one; a module is frozen by "
                    "`module.requires_grad_(False)`"
                )
        kept.digest = _digest(value) if check else None
        self.in_use = True
        self.keep(key, kept)

    def on(self, key: Key, device: torch.device | None, fetch: Callable[[], Any] | None = None) -> Any:
        """The value on a device (``None``: where it is), fetched once for all threads that want it at the same time.

        ``fetch`` is ``None`` at the value's home. Raises :class:`ResidentError` if the value has been changed in place,
        or its handle has been closed.
        """
        mine = None
        with self._lock:
            self.in_use = True
            kept, coming = self._kept.get(key), self._coming.get(key)
            if kept is None and coming is None and fetch is not None:
                coming = mine = self._coming[key] = Future()
        if mine is not None and fetch is not None:
            self._fetch(key, fetch, mine)
        if kept is None and coming is not None:
            with lent():
                kept = coming.result()
        kept = kept or self.find(key)
        kept.check()
        return kept.on(device)

    def _fetch(self, key: Key, fetch: Callable[[], Any], coming: Future[_KeptValue]) -> None:
        try:
            kept = _kept(fetch())
        except BaseException as error:
            self._arrived(key, coming)
            coming.set_exception(error)
        else:
            self._arrived(key, coming, kept)
            coming.set_result(kept)

    def _arrived(self, key: Key, coming: Future[_KeptValue], kept: _KeptValue | None = None) -> None:
        with self._lock:
            if self._coming.get(key) is coming:
                del self._coming[key]
                if kept is not None:
                    self.keep(key, kept)

    def release(self, key: Key, *, coming: bool = False) -> _KeptValue | None:
        """See :class:`Kept`; who waits for a value that is on its way still gets it, but it is not kept."""
        with self._lock:
            self._coming.pop(key, None)
            return super().release(key, coming=coming)

    def hand_out(self, key: Key, worker: int) -> Any:
        """At the value's home: the value, for a worker that keeps it from now on; errors as for :meth:`check`."""
        kept = self.check(key)  # which may take long, so others may look for their values meanwhile
        with self._lock:
            self.find(key).holders.add(worker)  # unless it was freed meanwhile
        return kept.value

    def check(self, key: Key) -> _KeptValue:
        """Raise :class:`ResidentError` if a value of this worker has been changed in place or freed; else return it."""
        kept = self.find(key)
        kept.check()
        return kept


def _missing() -> ResidentError:
    return ResidentError("a resident was used after its handle had been closed: `put` the value again")


def _kept(value: Any) -> _KeptValue:
    tensors = pack(value, main_by_name=True).tensors
    return _KeptValue(value, tensors, Seen(tensors, memory=True))


def _digest(value: Any) -> bytes:
    message = pack(value, main_by_name=True)
    found = hashlib.blake2b(message.skeleton, digest_size=16)
    for structure in message.structures:
        found.update(structure)
    for tensor in message.tensors:
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.digest()


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"an object of class {type(value).__qualname__}"
