"""A request → one that can be sent again, together with the requests that made the graph to which it goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import Tensor

from torchopt_dist._torch_private import tensor_version
from torchopt_dist.distributed._future import Future
from torchopt_dist.distributed._message import Message
from torchopt_dist.distributed._payload import ExecutionOptions
from torchopt_dist.distributed._protocol import Key
from torchopt_dist.distributed._wire_format import SMALL
from torchopt_dist.distributed.transport.base import Sender
from torchopt_dist.errors import CallTimeoutError

__all__ = ["ANOTHER_GRAPH", "Ask", "Sent", "check_unchanged", "is_copied"]

ANOTHER_GRAPH = (
    "the share of a lost worker has another graph when it runs again: its function depends on more than its arguments "
    "and torch's random numbers"
)
"""The error text for a function that is not pure."""


def is_copied(message: Message, number: int) -> bool:
    """Whether the caller keeps a copy of a tensor that may be sent again: a small one, or one that a module may change.

    Of the others, which are the caller's own, it keeps the versions.
    """
    tensor = message.tensors[number]
    return number in message.buffers or tensor.nbytes <= SMALL


def check_unchanged(tensor: Tensor, version: int | None) -> None:
    """Raise ``RuntimeError`` if a tensor that was sent has been changed in place since."""
    if tensor_version(tensor) != version:
        raise RuntimeError(
            f"the share of a lost worker cannot run again: a tensor that it was sent, of shape {tuple(tensor.shape)}, "
            "has been changed in place since. Run backward before the optimizer's step, or make the call "
            "asynchronous, which copies what it sends"
        )


@dataclass
class Sent:
    """A request that can be sent again.

    Attributes:
        message: the request, with copies of small tensors and of those that a module may change.
        versions: for the other tensors, which are the caller's own, how often each had been changed in place.
        connected: the tensors of its reply that belong to the graph which the worker keeps; ``None`` until it is there.
    """

    message: Message
    versions: dict[int, int | None]
    connected: tuple[int, ...] | None = None

    @classmethod
    def of(cls, message: Message) -> Sent:
        """Keep a request."""
        kept, versions = message.detached(), {}
        for number, tensor in enumerate(kept.tensors):
            if is_copied(kept, number):
                kept.tensors[number] = tensor.clone()
            elif not tensor.is_inference():
                versions[number] = tensor_version(tensor)
        return cls(kept, versions)

    def again(self) -> Message:
        """The request, to be sent.

        Raises:
            RuntimeError: a tensor of the caller has been changed in place since.
        """
        tensors: list[Tensor] = []
        for number, tensor in enumerate(self.message.tensors):
            if number in self.versions:
                check_unchanged(tensor, self.versions[number])
            tensors.append(tensor.detach() if number in self.versions else tensor.clone())
        return replace(self.message, tensors=tensors)


class Graph(Protocol):
    """The caller's record of a graph that a worker keeps."""

    key: Key
    worker: int

    def moved(self, worker: int, transport: Sender) -> None:
        """Record that another worker keeps it."""


@dataclass(eq=False)
class Ask:
    """A request that some worker is to answer.

    Attributes:
        requests: the requests that make the graph to which it goes, and then the request itself.
        graphs: the graphs at the worker that answers; the first is at the worker that is asked first.
        transport: the transport to that worker.
        tried: the workers that must not be asked again; one set for all graphs of a call, so that no worker has two of
            one key.
        seconds: the time limit for all of it; 0: none.
        options: the call's options, with ``retries`` and ``hedge_after``.
        resident: whether the first worker has the graph, so that the request waits for that worker.
        movable: whether another worker can be asked.
        beside: makes a transport to this process.
        may_go: whether a survivor of this rank can be asked.
        before: the graphs that led there, which who makes the graph again makes, too: their keys, and what finds their
            records, if these are left.
        spent: how many of the retries an earlier request for the same has used.
        future: the future of the reply.
        under_way: the workers that work on it.
        elsewhere: whether another worker than the first is to be asked.
        answered: whether the future has its result.
        since: the time, by ``time.monotonic``, since when it waits for a worker.
    """

    requests: list[Sent]
    graphs: Sequence[Graph]
    transport: Sender
    tried: set[int]
    seconds: float
    options: ExecutionOptions
    resident: bool
    movable: bool
    beside: Callable[[], Sender]
    may_go: Callable[[int], bool]
    before: Sequence[tuple[Key, Callable[[], Graph | None]]] = ()
    spent: int = 0
    future: Future[Message] = field(default_factory=Future)
    under_way: set[int] = field(default_factory=set)
    elsewhere: bool = False
    answered: bool = False
    since: float = 0.0

    def __post_init__(self) -> None:
        self.retries = max(0, self.options.retries - self.spent)
        self.started = time.monotonic()
        self.first = self.graphs[0].worker

    def is_strange(self, worker: int) -> bool:
        """Whether a worker should have nothing of it to do: it was sent there instead, or is answered already."""
        return self.answered or worker != self.first

    def seconds_left(self) -> float:
        """How many seconds a worker may take; 0 means no limit."""
        if not self.seconds:
            return 0.0
        left = self.started + self.seconds - time.monotonic()
        if left <= 0:
            raise CallTimeoutError(f"no worker has answered within timeout={self.seconds:g} s")
        return left
