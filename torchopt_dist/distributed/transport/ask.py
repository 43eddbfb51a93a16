"""A call → one that can be sent again, to any worker and any number of times, and what may still be tried for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from torch import Tensor

from torchopt_dist._future import Future
from torchopt_dist._versions import Seen
from torchopt_dist.distributed.messages.message import Message
from torchopt_dist.distributed.messages.requests import Key
from torchopt_dist.distributed.serialization.wire import SMALL
from torchopt_dist.distributed.transport.base import Sender
from torchopt_dist.errors import CallTimeoutError

__all__ = ["ANOTHER_GRAPH", "Ask", "Attempt", "Deadline", "Sent", "check_unchanged", "is_copied"]

ANOTHER_GRAPH = (
    "the share of a lost worker has another graph when it runs again: its function depends on more than its arguments "
    "and torch's random numbers"
)
"""The error text for a function that is not pure."""


def is_copied(message: Message, number: int) -> bool:
    """Whether the caller keeps a copy of a tensor that may be sent again: a small one, or one that a module may change.

    Of the others, which are the caller's own, it sees whether they change.
    """
    tensor = message.tensors[number]
    return number in message.buffers or tensor.nbytes <= SMALL


def check_unchanged(sent: Seen) -> None:
    """Raise ``RuntimeError`` if a tensor that was sent has been changed in place since."""
    for index in sent.changed():
        shape = tuple(sent.tensors[index].shape)
        raise RuntimeError(
            f"the share of a lost worker cannot run again: a tensor that it was sent, of shape {shape}, has "
            "been changed in place since. Run backward before the optimizer's step, or make the call asynchronous, "
            "which copies what it sends"
        )


class Deadline:
    """A time limit of so many seconds from now on; 0: none."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until = time.monotonic() + seconds

    def left(self) -> float:
        """How many seconds are left; 0: no limit. Raises ``CallTimeoutError`` if none are."""
        if not self._seconds:
            return 0.0
        left = self._until - time.monotonic()
        if left <= 0:
            raise CallTimeoutError(f"no worker has answered within timeout={self._seconds:g} s")
        return left


@dataclass
class Sent:
    """A call that can be sent again.

    Attributes:
        message: with copies of small tensors and of those that a module may change.
        key: the key in the request; if another one is to be used, or this is ``None``, it is sent beside the request.
        own: the other tensors, which are the caller's own.
    """

    message: Message
    key: Key | None
    own: Seen

    @classmethod
    def of(cls, message: Message, key: Key | None) -> Sent:
        """Keep a request."""
        kept, own = message.detached(), list[Tensor]()
        for number, tensor in enumerate(kept.tensors):
            if is_copied(kept, number):
                kept.tensors[number] = tensor.clone()
            else:
                own.append(tensor)
        return cls(kept, key, Seen(own))

    def again(self, key: Key) -> Message:
        """The request under this key; raises ``RuntimeError`` if a tensor of the caller was changed in place since."""
        check_unchanged(self.own)
        own = {id(tensor) for tensor in self.own.tensors}
        tensors = [x.detach() if id(x) in own else x.clone() for x in self.message.tensors]
        return replace(self.message, tensors=tensors, key=None if key == self.key else key)


class Attempt(NamedTuple):
    """One sending of a call: to a worker, by a transport, under a key that no other sending has."""

    worker: int
    transport: Sender
    key: Key


class Graph(Protocol):
    """The caller's record of the graph that the worker keeps which answers."""

    key: Key
    worker: int
    transport: Sender
    kept: bool

    def is_at(self, attempt: Attempt) -> None:
        """Record which attempt was answered."""


@dataclass(eq=False)
class Ask:
    """A call that some worker is to answer.

    Attributes:
        graph: at the worker that is asked first.
        retries: how many losses of workers it outlives.
        hedge_after: after how many seconds without an answer another worker is asked as well; ``None``: never.
        beside: makes a transport to this process.
        may_go: whether a survivor of this rank can be asked.
        avoided: workers that are asked only if nobody else is left.
        attempts: all that have been made; those in ``under_way`` are not answered yet.
    """

    sent: Sent
    graph: Graph
    retries: int
    hedge_after: float | None
    deadline: Deadline
    beside: Callable[[], Sender]
    may_go: Callable[[int], bool]
    avoided: Collection[int] = ()
    future: Future[Message] = field(default_factory=Future)
    attempts: list[Attempt] = field(default_factory=list)
    under_way: list[Attempt] = field(default_factory=list)
    answered: bool = False

    def __post_init__(self) -> None:
        self.home = Attempt(self.graph.worker, self.graph.transport, self.graph.key)
