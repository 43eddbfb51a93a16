"""Chunks of gradients, in any order → chunks by their number, or whole gradients.

A gradient on its way up a tree comes in chunks before the reply to its backward, so that a worker on the way adds up
and passes on the first chunks while the others come. When the reply is there, all chunks have come.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from torchopt_dist.distributed._future import Future
from torchopt_dist.distributed._message import Message
from torchopt_dist.distributed._protocol import Key
from torchopt_dist.distributed._streams import Chunk

__all__ = ["Arriving", "Deferred", "GradientStreams"]


class Arriving:
    """The chunks of the gradients that one backward asks for.

    Args:
        keeps: whether chunks that have been taken are also put together.
    """

    def __init__(self, *, keeps: bool = False) -> None:
        self._keeps = keeps
        self._queue: queue.SimpleQueue[tuple[int, Chunk] | None] = queue.SimpleQueue()
        self._here: dict[int, Chunk] = {}
        self._ended = False

    def put(self, index: int, chunk: Chunk) -> None:
        """A chunk has come."""
        self._queue.put((index, chunk))

    def ends_with(self, reply: Future[Message]) -> None:
        """Expect no more chunks when the reply is there, or has failed."""
        end = self._queue  # the reply does not keep the chunks
        reply.add_done_callback(lambda _: end.put(None))

    def take(self, index: int) -> Chunk | None:
        """Wait for a chunk; ``None`` if it does not come, since the backward has failed."""
        while index not in self._here and not self._ended:
            self._take_up()
        return self._here.get(index) if self._keeps else self._here.pop(index, None)

    def put_together(self, leaves: Sequence[Tensor], places: Sequence[int]) -> dict[int, Tensor]:
        """Put chunks together to whole gradients as they come, until the reply is there.

        Args:
            leaves: the inputs of the call.
            places: for each number of a piece, the index of its leaf.

        Returns:
            The gradients by the indices of their leaves; these are whole if the backward has not failed.
        """
        grads: dict[int, Tensor] = {}
        while True:
            while self._here:
                for number, start, values in self._here.popitem()[1]:
                    place = places[number]
                    if place not in grads:
                        shape = leaves[place].shape
                        grads[place] = torch.empty(shape, dtype=values.dtype, device=values.device)
                    grads[place].view(-1)[start : start + len(values)] = values
            if self._ended:
                return grads
            self._take_up()

    def _take_up(self) -> None:
        arrived = self._queue.get()
        if arrived is None:
            self._ended = True
        else:
            index, chunk = arrived
            self._here[index] = chunk


class Deferred(NamedTuple):
    """A child's gradients, for which a worker inside a tree does not wait in the autograd engine.

    Attributes:
        inputs: the tensors of which they are the gradients.
        arriving: the chunks of some of these.
        finish: waits for the reply; returns the gradients that do not come in chunks, and those of a recorded backward
            all.
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


class GradientStreams:
    """The gradients that come to a worker in chunks, and those for which it waits later."""

    def __init__(self) -> None:
        self._arriving: weakref.WeakValueDictionary[Key, Arriving] = weakref.WeakValueDictionary()
        self._thread = threading.local()

    def opened(self, key: Key, *, keeps: bool = False) -> Arriving:
        """A receiver for the chunks of a backward, which lives as long as something refers to it."""
        arriving = self._arriving[key] = Arriving(keeps=keeps)
        return arriving

    def put(self, key: Key, index: int, chunk: Chunk) -> None:
        """A chunk has come; that of a backward which has failed is dropped."""
        arriving = self._arriving.get(key)
        if arriving is not None:
            arriving.put(index, chunk)

    @contextmanager
    def deferring(self, leaves: Sequence[Tensor]) -> Iterator[list[Deferred]]:
        """A context in which this thread puts off waits for children's gradients of these leaves, and of these only.

        Args:
            leaves: those whose gradients come and go in chunks, in this order.

        Yields:
            The waits that were put off, in the order in which the engine would have added the gradients.
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
            finish: see :class:`Deferred`.
        """
        deferring = getattr(self._thread, "deferring", None)
        if deferring is None:
            return False
        leaves, deferred = deferring
        if [id(inputs[place]) for place in places] != [id(leaf) for leaf in leaves]:
            return False
        deferred.append(Deferred(inputs, arriving, finish))
        return True
