"""A worker's own gradients and those of its children, chunk by chunk → their sums, sent to the worker that asked.

The autograd engine would add gradients when all of them are there; here they are added as they come: the own gradient
first, then the children's in the engine's order. So a sum has the same bits as the engine's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from torchopt_dist.distributed.group.chunks import Deferred, Piece, chunks_of
from torchopt_dist.distributed.group.group import answering_group
from torchopt_dist.distributed.messages.message import Message
from torchopt_dist.distributed.messages.requests import Key, Reply
from torchopt_dist.distributed.serialization.pickling import pack, reply_of, unpack
from torchopt_dist.distributed.worker.chunk_requests import TakeChunk
from torchopt_dist.process.future import Future

__all__ = ["add_up", "with_gradients"]


def add_up(
    grads: list[Tensor | None],
    leaves: Sequence[Tensor],
    places: Sequence[int],
    deferred: Sequence[Deferred],
    key: Key,
    *,
    recorded: bool,
) -> list[Tensor | None]:
    """Send the sums of the gradients at ``places``, which go in chunks; returns those of the others.

    A recorded backward returns all sums, with their graph; those that were sent are then left out of the reply. ``key``
    is that of the backward that has asked for the gradients. Raises what a child's backward has raised, or the error of
    the worker that cannot take a chunk.
    """
    group, asker = answering_group(), key[0]
    transport = group.transport.to(asker)
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
        with group.recorder.span("reply", key, asker) as span:
            message = span.made(pack(TakeChunk(key, False, index, chunk), main_by_name=True)).detached()
        sent.append(transport.send(asker, message, 0))
    indices = {id(leaf): place for place, leaf in enumerate(leaves)}
    for child in deferred:
        for leaf, grad in zip(child.inputs, child.finish(), strict=True):
            if grad is not None:
                place = indices[id(leaf)]
                before = total[place]
                total[place] = grad if before is None else before + grad.to(before.device)
    for each in sent:  # so that all have come when the reply comes
        reply_of(each.result(), group.names[asker])
    return total


def with_gradients(reply: Message, whole: Mapping[int, Tensor]) -> Message:
    """The reply to a recorded backward, with the gradients that it has left out, by their places."""
    if not whole:
        return reply
    content: Reply = unpack(reply)
    values = content.values  # none if the backward has failed
    numbers = {id(tensor): number for number, tensor in enumerate(reply.tensors)}
    tensors = [*reply.tensors]
    for place, grad in whole.items() if values else ():
        tensors[numbers[id(values[place])]] = grad
    return reply.with_tensors(tensors)
