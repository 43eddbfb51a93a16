"""A worker's own gradients and those of its children, chunk by chunk → their sums, sent to the worker that asked.

The autograd engine would add gradients when all of them are there; here they are added as they come: the own gradient
first, then the children's in the engine's order. So a sum has the same bits as the engine's.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torchopt_dist.distributed._gradient_streams import Deferred
from torchopt_dist.distributed._group import Group, answering_group
from torchopt_dist.distributed._message import Message
from torchopt_dist.distributed._protocol import Errand, Key, Reply
from torchopt_dist.distributed._serialization import pack, unpack
from torchopt_dist.distributed._streams import Chunk, Piece, chunks_of

__all__ = ["GradientChunk", "add_up"]


@dataclass(frozen=True)
class GradientChunk(Errand):
    """Take a part of the gradients that a backward, of the same key, has asked for.

    Attributes:
        index: the number of the part.
        chunk: the part; a tensor that has no gradient has no piece in it.
    """

    index: int
    chunk: Chunk

    def __reduce__(self) -> tuple[type[GradientChunk], tuple[Any, ...]]:
        """Its fields, without their names."""
        return GradientChunk, (self.key, self.keep, self.index, self.chunk)

    def run(self, request: Message) -> list[Any]:
        """See :class:`Errand`."""
        del request
        answering_group().gradient_streams.put(self.key, self.index, self.chunk)
        return []


def add_up(
    grads: list[Tensor | None],
    leaves: Sequence[Tensor],
    places: Sequence[int],
    deferred: Sequence[Deferred],
    key: Key,
) -> list[Tensor | None]:
    """Send the sums of the gradients that go in chunks; returns those of the others.

    Args:
        grads: this worker's own gradients.
        leaves: the leaf of each of these gradients.
        places: the indices of those that are sent in chunks.
        deferred: the children's gradients.
        key: the key of the backward that has asked for the gradients.

    Raises:
        Exception: a child's backward has failed, or the worker that asked cannot take a chunk.
    """
    group = answering_group()
    total = list(grads)
    own: dict[int, Tensor] = {}
    for number, place in enumerate(places):
        grad = total[place]
        if grad is not None:
            own[number] = grad.detach().reshape(-1)
            total[place] = None
    sent: list[Future[Message]] = []
    for index, layout in enumerate(chunks_of([leaves[place] for place in places])):
        sums = {
            number: own[number][start : start + len(part)] for number, start, part in layout if number in own
        }
        for child in deferred:
            for number, _, values in child.take(index):
                before = sums.get(number)
                sums[number] = values if before is None else before + values.to(before.device)
        chunk = tuple(Piece(number, start, sums[number]) for number, start, _ in layout if number in sums)
        sent.append(_send(group, GradientChunk(key, False, index, chunk)))
    indices = {id(leaf): place for place, leaf in enumerate(leaves)}
    for child in deferred:
        for leaf, grad in zip(child.inputs, child.finish(), strict=True):
            if grad is not None:
                place = indices[id(leaf)]
                before = total[place]
                total[place] = grad if before is None else before + grad.to(before.device)
    for each in sent:  # so that all of them have come when the reply comes
        reply: Reply = unpack(each.result().received())
        if reply.exception is not None:
            raise reply.exception.to_error(group.names[key[0]])
    return total


def _send(group: Group, chunk: GradientChunk) -> Future[Message]:
    asker = chunk.key[0]
    with group.recorder.span("reply", chunk.key, asker) as span:
        message = span.made(pack(chunk, main_by_name=True)).detached()
    return group.transport.to(asker).send(asker, message, 0)
