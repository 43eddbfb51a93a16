"""A chunk → a request to the worker that needs it for another request, or has asked for it; there, into its streams."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchopt_dist.distributed._chunks import Chunk
from torchopt_dist.distributed._group import answering_group
from torchopt_dist.distributed._protocol import Errand

__all__ = ["TakeChunk"]


@dataclass(frozen=True)
class TakeChunk(Errand):
    """Take a part of the tensors that another request, of the same key, needs or has asked for.

    Attributes:
        index: the number of the part.
        chunk: the part; a gradient that there is not has no piece in it.
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
