"""Chunks of gradients, in any order → at who takes them: by their number, or together as whole tensors.

A gradient on its way up a tree comes in chunks before the reply to its backward, so that a worker on the way adds up
and passes on the first chunks while the others come. When the reply is there, all chunks have come.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from torchopt_dist.distributed._message import Message
from torchopt_dist.distributed._protocol import Key
from torchopt_dist.distributed._streams import Chunk

__all__ = ["Arriving", "Deferred", "GradientStreams"]


class Arriving:
    """The chunks of the gradients that one backward asks for."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[int, Chunk] | None] = queue.SimpleQueue()
        self._here: dict[int, Chunk] = {}
        self._ended = False

    def put(self, index: int, chunk: Chunk) -> None:
        """A chunk has come."""
        self._queue.put((index, chunk))

    def ends_with(self, reply: Future[Message]) -> None:
        """No more chunks come when the reply is there, or will not come."""
        end = self._queue  # the reply does not keep the chunks
        reply.add_done_callback(lambda _: end.put(None))

    def take(self, index: int) -> Chunk | None:
        """Wait for a chunk; ``None`` if it does not come, since the backward has failed."""
        while index not in self._here and not self._ended:
            self._take_up()
        return self._here.pop(index, None)

    def put_together(
        self, grads: list[Tensor | None], leaves: Sequence[Tensor], places: Sequence[int]
    ) -> None:
        """Wait for all chunks, and make whole gradients of them.

        Args:
            grads: the gradients; those that come in chunks are put in.
            leaves: what each of these is the gradient of.
            places: for each number of a piece, which of these it is a part of.
        """
        while not self._ended:
            self._take_up()
        while self._here:
            for number, start, values in self._here.popitem()[1]:
                place = places[number]
                grad = grads[place]
                if grad is None:
                    shape = leaves[place].shape
                    grads[place] = grad = torch.empty(shape, dtype=values.dtype, device=values.device)
                grad.view(-1)[start : start + len(values)] = values

    def _take_up(self) -> None:
        arrived = self._queue.get()
        if arrived is None:
            self._ended = True
        else:
            index, chunk = arrived
            self._here[index] = chunk


class Deferred(NamedTuple):
    """A child's gradients, for which a worker on the way does not wait inside the autograd engine.

    Attributes:
        inputs: what they are the gradients of.
        arriving: the chunks of some of these.
        finish: waits for the reply; returns the gradients that do not come in chunks.
    """

    inputs: list[Tensor]
    arriving: Arriving
    finish: Callable[[], list[Tensor | None]]

    def take(self, index: int) -> Chunk:
        """Wait for a chunk; raises what the backward has failed with."""
        chunk = self.arriving.take(index)
        if chunk is None:
            self.finish()
            raise LookupError(f"a backward has ended without part {index} of its gradients")
        return chunk


class GradientStreams:
    """The gradients that come to a worker in chunks, and those for which it waits later."""

    def __init__(self) -> None:
        self._arriving: weakref.WeakValueDictionary[Key, Arriving] = weakref.WeakValueDictionary()
        self._thread = threading.local()

    def opened(self, key: Key) -> Arriving:
        """Where the chunks of a backward come from now on, as long as somebody holds it."""
        arriving = self._arriving[key] = Arriving()
        return arriving

    def put(self, key: Key, index: int, chunk: Chunk) -> None:
        """A chunk has come; that of a backward which has failed is dropped."""
        arriving = self._arriving.get(key)
        if arriving is not None:
            arriving.put(index, chunk)

    @contextmanager
    def deferring(self, leaves: Sequence[Tensor]) -> Iterator[list[Deferred]]:
        """Until the context is left, what children send for these leaves, and only these, is put off in this thread.

        Args:
            leaves: those whose gradients come and go in chunks, in this order.

        Yields:
            What has been put off, in the order in which the engine would have added it.
        """
        deferred: list[Deferred] = []
        before = getattr(self._thread, "deferring", None)
        self._thread.deferring = leaves, deferred
        try:
            yield deferred
        finally:
            self._thread.deferring = before

    def put_off(
        self,
        inputs: list[Tensor],
        places: Sequence[int],
        arriving: Arriving,
        finish: Callable[[], list[Tensor | None]],
    ) -> bool:
        """Put off a wait, if this thread does so; returns whether it does.

        Args:
            inputs: see :class:`Deferred`.
            places: which of these come in chunks.
            arriving: see :class:`Deferred`.
            finish: likewise.
        """
        deferring = getattr(self._thread, "deferring", None)
        if deferring is None:
            return False
        leaves, deferred = deferring
        if [id(inputs[place]) for place in places] != [id(leaf) for leaf in leaves]:
            return False
        deferred.append(Deferred(inputs, arriving, finish))
        return True
