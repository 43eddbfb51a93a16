"""Key → a value that stays on this worker: one that was put here, or one fetched from the worker where it was put.

A handle is sent instead of the value: a worker that gets a handle for the first time fetches the value from its home,
and keeps it until the home frees it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from torchopt_dist.core.inputs import Seen
from torchopt_dist.core.random_turns import lent
from torchopt_dist.distributed.group.kept import Kept
from torchopt_dist.distributed.messages.requests import Key
from torchopt_dist.distributed.serialization.pickling import pack, unpack
from torchopt_dist.errors import ResidentError

__all__ = ["Residents"]


@dataclass
class _Kept:
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


class Residents(Kept[_Kept]):
    """The values that stay on a worker; ``in_use``: there has been a handle, so calls must search for handles."""

    def __init__(self, has_gone: Callable[[Key], bool]) -> None:
        super().__init__(_missing, has_gone)
        self.in_use = False
        self._coming: dict[Key, Future[_Kept]] = {}

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

    def _fetch(self, key: Key, fetch: Callable[[], Any], coming: Future[_Kept]) -> None:
        try:
            kept = _kept(fetch())
        except BaseException as error:
            self._arrived(key, coming)
            coming.set_exception(error)
        else:
            self._arrived(key, coming, kept)
            coming.set_result(kept)

    def _arrived(self, key: Key, coming: Future[_Kept], kept: _Kept | None = None) -> None:
        with self._lock:
            if self._coming.get(key) is coming:
                del self._coming[key]
                if kept is not None:
                    self.keep(key, kept)

    def release(self, key: Key, *, coming: bool = False) -> _Kept | None:
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

    def check(self, key: Key) -> _Kept:
        """Raise :class:`ResidentError` if a value of this worker has been changed in place or freed; else return it."""
        kept = self.find(key)
        kept.check()
        return kept


def _missing() -> ResidentError:
    return ResidentError("a resident was used after its handle had been closed: `put` the value again")


def _kept(value: Any) -> _Kept:
    tensors = pack(value, main_by_name=True).tensors
    return _Kept(value, tensors, Seen(tensors, memory=True))


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
