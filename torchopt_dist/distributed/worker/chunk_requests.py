"""A chunk → a request to the worker that needs it for another request, or has asked for it; there, into its streams.

A message whose large tensors come later is filled in by them (:func:`arriving`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from torchopt_dist.distributed.group.chunks import Chunk
from torchopt_dist.distributed.group.group import answering_group
from torchopt_dist.distributed.messages.message import Message
from torchopt_dist.distributed.messages.requests import Errand, Key

__all__ = ["TakeChunk", "arriving"]


@dataclass(frozen=True)
class TakeChunk(Errand):
    """Take a part of the tensors that another request, of the same key, needs or has asked for.

    ``index`` is the number of the part; a gradient that there is not has no piece in it.
    """

    index: int
    chunk: Chunk

    def __reduce__(self) -> tuple[type[TakeChunk], tuple[Any, ...]]:
        """Its fields, without their names."""
        return TakeChunk, (self.key, self.keep, self.index, self.chunk)

    def values(self) -> list[Any]:
        """See :class:`Errand`."""
        answering_group().streams.put(self.key, self.index, self.chunk)
        return []


@contextmanager
def arriving(message: Message, key: Key) -> Iterator[Iterator[Chunk]]:
    """Yield the chunks of the late tensors of a message; each is in its place when the next one is asked for.

    Raises :class:`CallTimeoutError` if they have not come in time, and :class:`WorkerLostError` if the worker that
    sends them is gone, or has given up.
    """
    group, late = answering_group(), message.late
    group.transport.about_to_wait()
    flat: list[torch.Tensor] = []
    for leaf, shape in zip(message.late_tensors(), late.shapes if late else (), strict=True):
        leaf.data = torch.empty(shape, dtype=leaf.dtype, device=leaf.device)
        flat.append(leaf.data.view(-1))  # has a version counter of its own
    count, seconds = (0, 0.0) if late is None else (late.chunks, late.seconds)
    with group.streams.opened(key, count, seconds) as chunks:
        if group.has_gone(key):
            raise group.membership.loss_of(key[0])

        def filled() -> Iterator[Chunk]:
            for chunk in chunks:
                yield chunk
                for number, start, values in chunk:
                    flat[number][start : start + len(values)].copy_(values)

        yield filled()
