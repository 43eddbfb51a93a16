"""A chunk of large tensors → a request to the worker that needs them for another one; there, into its streams."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from torchopt_dist.distributed._future import Future
from torchopt_dist.distributed._group import answering_group
from torchopt_dist.distributed._message import Message
from torchopt_dist.distributed._protocol import Errand, Reply
from torchopt_dist.distributed._remote_graph import RemoteGraph
from torchopt_dist.distributed._serialization import pack, unpack
from torchopt_dist.distributed._streams import Chunk
from torchopt_dist.distributed.transport.base import settle

__all__ = ["Chunks", "send_chunk"]


@dataclass(frozen=True)
class Chunks(Errand):
    """Take a part of the tensors that another request, of the same key, needs.

    Attributes:
        chunk: the part.
    """

    chunk: Chunk

    def __reduce__(self) -> tuple[type[Chunks], tuple[Any, ...]]:
        """Its fields, without their names."""
        return Chunks, (self.key, self.keep, self.chunk)

    def run(self, request: Message) -> list[Any]:
        """See :class:`Errand`."""
        del request
        answering_group().streams.put(self.key, self.chunk)
        return []


def send_chunk(graph: RemoteGraph, chunk: Chunk, reply: Future[Message]) -> None:
    """Send a part of the tensors that a request needs.

    Args:
        graph: that the request makes.
        chunk: the part.
        reply: to the request; it fails if the chunk does not arrive, as for a lack of memory.
    """
    with graph.span("send"):
        message = pack(Chunks(graph.key, False, chunk), main_by_name=True).detached()
        sent = graph.transport.send(graph.worker, message, graph.timeout)
    sent.add_done_callback(partial(_check, graph, reply))


def _check(graph: RemoteGraph, reply: Future[Message], sent: Future[Message]) -> None:
    error = sent.exception()
    if error is None:
        answer: Reply = unpack(sent.result())
        if answer.exception is None:
            return
        error = answer.exception.to_error(graph.worker_name)
    if isinstance(error, Exception):
        settle(reply, error)
        graph.release()
