"""Large tensors ⇄ chunks; chunks, as they come to a worker → each by its number, under the key of its request.

Down a tree go the tensors that all shares have, up it go the sums of their gradients, and a worker passes on the first
chunks while the others come. A chunk may come before its request, since several threads receive; then it is kept.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias

from torch import Tensor, nn

from torchopt_dist.distributed.messages.requests import Key
from torchopt_dist.distributed.serialization.wire import SMALL
from torchopt_dist.errors import CallTimeoutError, WorkerLostError

__all__ = ["Arriving", "Chunk", "Deferred", "Piece", "Streams", "can_be_cut", "chunks_of"]

CHUNK = 1 << 19
"""Bytes of a chunk: few enough that a tree soon passes the first on, and enough that a request more costs little."""
OVER = 1 << 12
"""How many keys of requests that have ended are remembered, so that chunks which come later are dropped."""


class Piece(NamedTuple):
    """A part of the tensor of this number: its values from index ``start`` on, as if the tensor were flat."""

    number: int
    start: int
    values: Tensor


Chunk: TypeAlias = tuple[Piece, ...]


def can_be_cut(tensor: Tensor) -> bool:
    """Whether a tensor is large, and lies in memory as chunks of it would."""
    plain = type(tensor) in (Tensor, nn.Parameter) and not (tensor.is_conj() or tensor.is_neg())
    return plain and tensor.nbytes > SMALL and tensor.is_contiguous()


def chunks_of(tensors: Sequence[Tensor]) -> list[Chunk]:
    """Cut contiguous tensors into chunks of ``CHUNK`` bytes, but for the last one; no element is copied."""
    chunks: list[list[Piece]] = [[]]
    room = CHUNK
    for number, tensor in enumerate(tensors):
        flat, start = tensor.detach().view(-1), 0
        while start < len(flat):
            count = max(1, room // flat.itemsize)
            part = flat[start : start + count]
            chunks[-1].append(Piece(number, start, part))
            start, room = start + len(part), room - part.nbytes
            if room < flat.itemsize:
                chunks.append([])
                room = CHUNK
    return [tuple(chunk) for chunk in chunks if chunk]


class Arriving:
    """The chunks of one request; one thread at a time takes them."""

    def __init__(self, *, keeps: bool = False) -> None:
        self._keeps = keeps  # what was taken, so that it can be taken again
        self._queue: queue.SimpleQueue[tuple[int, Chunk] | None] = queue.SimpleQueue()
        self._here: dict[int, Chunk] = {}
        self._ended = False

    def put(self, index: int, chunk: Chunk) -> None:
        """A chunk has come."""
        self._queue.put((index, chunk))

    def end(self) -> None:
        """No more chunks come."""
        self._queue.put(None)

    def take(self, index: int, until: float | None = None) -> Chunk | None:
        """Wait for a chunk, by ``time.monotonic``; ``None`` if it does not come, ``queue.Empty`` if not in time."""
        while index not in self._here and not self._ended:
            left = None if until is None else max(0.0, until - time.monotonic())
            arrived = self._queue.get(timeout=left)
            if arrived is None:
                self._ended = True
            else:
                self._here[arrived[0]] = arrived[1]
        return self._here.get(index) if self._keeps else self._here.pop(index, None)

    def put_together(self, like: Sequence[Tensor]) -> dict[int, Tensor]:
        """Put chunks together as they come, until the end; the tensors, shaped as these, by their numbers."""
        whole: dict[int, Tensor] = {}
        for index in itertools.count():
            chunk = self.take(index)
            if chunk is None:
                break
            for number, start, values in chunk:
                if number not in whole:
                    whole[number] = values.new_empty(like[number].shape)
                whole[number].view(-1)[start : start + len(values)] = values
        return whole


class Deferred(NamedTuple):
    """A child's gradients of ``inputs``, for which a worker inside a tree does not wait in the autograd engine.

    ``arriving`` has the chunks of some of them. ``finish`` waits for the reply, and returns the gradients that do not
    come in chunks, and those of a recorded backward all.
    """

    inputs: list[Tensor]
    arriving: Arriving
    finish: Callable[[], list[Tensor | None]]

    def take(self, index: int) -> Chunk:
        """Wait for a chunk; raises the error of the backward."""
        chunk = self.arriving.take(index)
        if chunk is None:
            self.finish()
            raise LookupError(f"a backward has ended without part {index} of its gradients")
        return chunk


class Streams:
    """The chunks that come to a worker, and the gradients for which its threads wait later."""

    def __init__(self) -> None:
        self._arriving: dict[Key, Arriving] = {}
        self._over: dict[Key, None] = {}  # the last ones, the oldest first
        self._lock = threading.Lock()
        self._thread = threading.local()

    def put(self, key: Key, index: int, chunk: Chunk) -> None:
        """A chunk has come; that of a request which has ended is dropped."""
        with self._lock:
            if key not in self._over:
                self._of(key).put(index, chunk)

    def _of(self, key: Key) -> Arriving:
        if key not in self._arriving:
            self._arriving[key] = Arriving()
        return self._arriving[key]

    def expect(self, key: Key, *, keeps: bool = False) -> Arriving:
        """The chunks of a request that is about to be sent; see :class:`Arriving`."""
        with self._lock:
            arriving = self._arriving[key] = Arriving(keeps=keeps)
        return arriving

    @contextmanager
    def opened(self, key: Key, count: int, seconds: float) -> Iterator[Iterator[Chunk]]:
        """Yield the chunks of a request that has come, one after another; at the end the request is over.

        Raises :class:`CallTimeoutError` if not all have come in so many seconds (0: no limit), and
        :class:`WorkerLostError` if they will not come, since their sender has ended or given up.
        """
        with self._lock:
            if key in self._over:
                raise WorkerLostError("a call was given up before it began", rank=key[0])
            arriving = self._of(key)

        def take() -> Iterator[Chunk]:
            until = time.monotonic() + seconds if seconds else None
            for index in range(count):
                try:
                    chunk = arriving.take(index, until)
                except queue.Empty:
                    raise CallTimeoutError(
                        f"the tensors of a call have not come within timeout={seconds:g} s"
                    ) from None
                if chunk is None:
                    raise WorkerLostError("the rest of the tensors of a call will not come", rank=key[0])
                yield chunk

        try:
            yield take()
        finally:
            self.forget(key)

    def forget(self, key: Key) -> None:
        """Drop the chunks of a request that is over or was given up, and those still to come; who waits stops."""
        with self._lock:
            self._over[key] = None
            if len(self._over) > OVER:
                del self._over[next(iter(self._over))]
            arriving = self._arriving.pop(key, None)
        if arriving is not None:
            arriving.end()

    def forget_sender(self, rank: int) -> None:
        """Let requests that wait for chunks of a lost worker fail."""
        for key in [key for key in [*self._arriving] if key[0] == rank]:
            self.forget(key)

    def clear(self) -> None:
        """Drop all chunks, and let all waiting requests fail."""
        for key in [*self._arriving]:
            self.forget(key)

    @contextmanager
    def deferring(self, leaves: Sequence[Tensor]) -> Iterator[list[Deferred]]:
        """A context in which this thread puts off waits for children's gradients of these leaves, and of these only.

        Chunks of gradients are in the order of the leaves. It yields the waits that were put off, in the order in which
        the engine would have added the gradients.
        """
        deferred: list[Deferred] = []
        before = getattr(self._thread, "deferring", None)
        self._thread.deferring = leaves, deferred
        try:
            yield deferred
        finally:
            self._thread.deferring = before

    def put_off(self, leaves: Sequence[Tensor], wait: Deferred) -> bool:
        """Put off a wait for gradients of which those of ``leaves`` come in chunks, if this thread does so."""
        deferring = getattr(self._thread, "deferring", None)
        if deferring is None or [id(leaf) for leaf in deferring[0]] != [id(leaf) for leaf in leaves]:
            return False
        deferring[1].append(wait)
        return True
