"""A worker's own gradients and those of its children, chunk by chunk → their sums, sent to the worker that asked.

The autograd engine would add gradients when all of them are there; here they are added as they come: the own gradient
first, then the children's in the engine's order. So a sum has the same bits as the engine's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torchopt_dist.distributed._future import Future
from torchopt_dist.distributed._gradient_streams import Deferred
from torchopt_dist.distributed._group import Group, answering_group
from torchopt_dist.distributed._message import Message
from torchopt_dist.distributed._protocol import Errand, Key, Reply
from torchopt_dist.distributed._serialization import pack, unpack
from torchopt_dist.distributed._streams import Chunk, Piece, chunks_of

__all__ = ["GradientChunk", "add_up", "check_taken", "send_gradients", "with_gradients"]


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
    *,
    recorded: bool,
) -> list[Tensor | None]:
    """Send the sums of the gradients that go in chunks; returns those of the others.

    A recorded backward returns all sums, with their graph; those that were sent are then left out of the reply.

    Args:
        grads: this worker's own gradients.
        leaves: the leaf of each of these gradients.
        places: the indices of those that are sent in chunks.
        deferred: the children's gradients.
        key: the key of the backward that has asked for the gradients.
        recorded: whether the gradients are to be differentiated in turn.

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
            total[place] = grad if recorded else None
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
        sent.append(send_gradients(group, GradientChunk(key, False, index, chunk)))
    indices = {id(leaf): place for place, leaf in enumerate(leaves)}
    for child in deferred:
        for leaf, grad in zip(child.inputs, child.finish(), strict=True):
            if grad is not None:
                place = indices[id(leaf)]
                before = total[place]
                total[place] = grad if before is None else before + grad.to(before.device)
    check_taken(group, key, sent)
    return total


def with_gradients(reply: Message, whole: Mapping[int, Tensor]) -> Message:
    """The reply to a recorded backward, with the gradients that it has left out.

    Args:
        reply: the reply, as it has arrived.
        whole: the gradients that have come in chunks, by their places.
    """
    if not whole:
        return reply
    content: Reply = unpack(reply)
    values = content.values  # none if the backward has failed
    numbers = {id(tensor): number for number, tensor in enumerate(reply.tensors)}
    tensors = [*reply.tensors]
    for place, grad in whole.items() if values else ():
        tensors[numbers[id(values[place])]] = grad
    return reply.with_tensors(tensors)


def check_taken(group: Group, key: Key, sent: Sequence[Future[Message]]) -> None:
    """Wait until chunks have come, so that all have when the reply comes; raises the error of one that cannot be taken.

    Args:
        group: the group.
        key: the key of the backward that has asked for the gradients.
        sent: the replies to the chunks.
    """
    for each in sent:
        reply: Reply = unpack(each.result().received())
        if reply.exception is not None:
            raise reply.exception.to_error(group.names[key[0]])


def send_gradients(group: Group, chunk: GradientChunk) -> Future[Message]:
    """Send a chunk to the worker that has asked for the gradients."""
    asker = chunk.key[0]
    with group.recorder.span("reply", chunk.key, asker) as span:
        message = span.made(pack(chunk, main_by_name=True)).detached()
    return group.transport.to(asker).send(asker, message, 0)
