"""Large tensors → chunks, each a request of its own → on the worker a queue of them, by the key of the call.

A chunk may arrive before the request to which it belongs, since several threads receive; then it is kept.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple, TypeAlias

import torch
from torch import nn

from torchopt_dist.distributed._protocol import Key
from torchopt_dist.distributed._wire_format import SMALL
from torchopt_dist.errors import CallTimeoutError, WorkerLostError

__all__ = ["Chunk", "Piece", "Streams", "can_be_cut", "chunks_of"]

CHUNK = 1 << 19
"""Bytes of a chunk: few enough that a tree soon passes the first on, and enough that a request more costs little."""
GIVEN_UP = 1 << 12
"""How many keys are remembered of requests that were given up, so that chunks which come later are dropped."""


class Piece(NamedTuple):
    """A part of a tensor.

    Attributes:
        number: the number of the tensor.
        start: the index of its first element, as if the tensor were flat.
        values: the elements.
    """

    number: int
    start: int
    values: torch.Tensor


Chunk: TypeAlias = tuple[Piece, ...]


def can_be_cut(tensor: torch.Tensor) -> bool:
    """Whether a tensor is large, and lies in memory as chunks of it would."""
    plain = type(tensor) in (torch.Tensor, nn.Parameter) and not (tensor.is_conj() or tensor.is_neg())
    return plain and tensor.nbytes > SMALL and tensor.is_contiguous()


def chunks_of(tensors: Sequence[torch.Tensor]) -> list[Chunk]:
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


class Streams:
    """The chunks that a worker has received, and that a request has not taken yet."""

    def __init__(self) -> None:
        self._queues: defaultdict[Key, queue.SimpleQueue[Chunk | None]] = defaultdict(queue.SimpleQueue)
        self._unwanted: dict[Key, int] = {}
        self._open: set[Key] = set()
        self._given_up: dict[Key, None] = {}  # the last ones, the oldest first
        self._lock = threading.Lock()

    def put(self, key: Key, chunk: Chunk) -> None:
        """Add a chunk; a chunk of a request that has ended is dropped."""
        with self._lock:
            if key in self._given_up:
                return
            if key not in self._unwanted:
                self._queues[key].put(chunk)
                return
            self._unwanted[key] -= 1
            if not self._unwanted[key]:
                del self._unwanted[key]

    @contextmanager
    def opened(self, key: Key, count: int, seconds: float) -> Iterator[Iterator[Chunk]]:
        """Yield the chunks, in the order in which they come; those that have not come at the end are dropped.

        Args:
            key: the key of the request to which they belong.
            count: the number of chunks.
            seconds: how long to wait for all; 0: no limit.

        Raises:
            CallTimeoutError: the chunks have not come in time.
            WorkerLostError: the chunks will not come, since their sender has ended or given up.
        """
        taken, lost = 0, False

        def take() -> Iterator[Chunk]:
            nonlocal taken, lost
            until = time.monotonic() + seconds if seconds else None
            while taken < count:
                try:
                    left = None if until is None else max(0.0, until - time.monotonic())
                    chunk = arrived.get(timeout=left)
                except queue.Empty:
                    raise CallTimeoutError(
                        f"the tensors of a call have not come within timeout={seconds:g} s"
                    ) from None
                if not chunk:
                    lost = chunk is None
                    raise WorkerLostError("the rest of the tensors of a call will not come", rank=key[0])
                taken += 1
                yield chunk

        with self._lock:
            if key in self._given_up:
                raise WorkerLostError("a call was given up before it began", rank=key[0])
            arrived = self._queues[key]
            self._open.add(key)
        try:
            yield take()
        finally:
            with self._lock:
                self._open.discard(key)
                self._queues.pop(key, None)
                with suppress(queue.Empty):
                    while True:
                        chunk = arrived.get_nowait()
                        taken += bool(chunk)
                        lost |= chunk is None
                if taken < count and not lost:
                    self._unwanted[key] = count - taken

    def forget(self, key: Key) -> None:
        """Drop the chunks of a request, and those still to come."""
        with self._lock:
            if key in self._open and key in self._queues:
                self._queues[key].put(())
                return
            # Its request has ended, or comes later, or could not even be read.
            self._queues.pop(key, None)
            self._unwanted.pop(key, None)
            self._given_up[key] = None
            if len(self._given_up) > GIVEN_UP:
                del self._given_up[next(iter(self._given_up))]

    def forget_sender(self, rank: int) -> None:
        """Let requests that wait for chunks of a lost worker fail."""
        with self._lock:
            for key in [key for key in self._unwanted if key[0] == rank]:
                del self._unwanted[key]
            waiting = [self._queues.pop(key) for key in [*self._queues] if key[0] == rank]
        for each in waiting:
            each.put(None)

    def clear(self) -> None:
        """Drop all chunks, and let all waiting requests fail."""
        with self._lock:
            waiting = list(self._queues.values())
            self._queues.clear()
            self._unwanted.clear()
            self._given_up.clear()
        for each in waiting:
            each.put(None)
