"""The requests of a caller to a worker, each of which runs itself there → what it has made, with the ``Reply``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

import torch

from torchopt_dist.distributed.messages.caller_state import CallerState
from torchopt_dist.distributed.messages.payload import Payload
from torchopt_dist.pickling.serialized_exception import SerializedException

__all__ = ["Backward", "Call", "Errand", "Key", "Made", "Release", "Reply", "Request", "Worker"]

Key: TypeAlias = tuple[int, int]
"""Names a graph that a worker keeps: the caller's rank and a number that the caller never uses again."""


@dataclass
class Reply:
    """The answer to a request.

    Attributes:
        values: one for each task of a call; one for each input of a graph, ``None`` where it has no gradient.
        seconds: how long a sample of a call took, if the call asks.
        drew: whether tasks of a call drew random numbers; true also for a call with gradients, which nobody asks.
    """

    values: list[Any] = field(default_factory=list)
    exception: SerializedException | None = None
    warning: str | None = None
    seconds: float = 0.0
    drew: bool = True

    def __reduce__(self) -> tuple[type[Reply], tuple[Any, ...]]:
        """Its fields, without their names."""
        return Reply, (self.values, self.exception, self.warning, self.seconds, self.drew)


class Made(NamedTuple):
    """What a request has made on a worker.

    Attributes:
        inputs: the tensors from which the graph leads to the reply's, if it is to be kept.
        held: what the last of these are, if they stand for tensors of mirrors.
        shared: whether that graph has nodes in common with another one that is kept.
        left_out: the indices of values that are not sent, since the caller has them.
        used_up: what is to be freed only after the reply has been sent.
        within: makes the context of a backward through that graph.
    """

    reply: Reply
    inputs: Sequence[torch.Tensor] = ()
    held: Sequence[Any] = ()
    shared: bool = False
    left_out: Sequence[int] = ()
    used_up: Any = None
    within: Callable[[], AbstractContextManager[object]] = nullcontext


class Worker(Protocol):
    """The worker that has got a request.

    Attributes:
        inputs: the leaves of the request that require grad.
        held: what the last of these are, if they stand for tensors of mirrors.
    """

    inputs: Sequence[torch.Tensor]
    held: Sequence[Any]

    def execute(self, call: Call) -> Made:
        """Run a payload."""

    def differentiate(self, backward: Backward) -> Made:
        """Differentiate a graph that is kept here."""

    def release(self, request: Release) -> Made:
        """Forget what is kept under keys."""


@dataclass
class Call:
    """Run a payload."""

    payload: Payload
    key: Key
    keep: bool

    def run(self, worker: Worker) -> Made:
        """Do it on this worker."""
        return worker.execute(self)

    def __reduce__(self) -> tuple[Callable[..., Call], tuple[Any, ...]]:
        """As plain values, of which a pickler knows what to do without asking each object."""
        return _call, (*self.payload.plain(), self.key, self.keep)


def _call(*plain: Any) -> Call:
    """In a pickle: a call of the values that its ``__reduce__`` has given."""
    *payload, key, keep = plain
    return Call(Payload.of_plain(*payload), key, keep)


@dataclass(frozen=True)
class Errand(ABC):
    """Do something of this package's own, which knows itself how that is done."""

    key: Key
    keep: bool

    def run(self, worker: Worker) -> Made:
        """Do it on this worker."""
        return Made(Reply(self.values(), drew=False), worker.inputs, worker.held)

    @abstractmethod
    def values(self) -> list[Any]:
        """Do it; returns the values of the reply."""


BACKWARD_TWICE = (
    "Trying to backward through the graph of a remote call a second time: give retain_graph=True the first"
)
"""The error text, on both sides, of a backward through outputs that an earlier backward has used up."""


@dataclass(frozen=True)
class Backward:
    """Differentiate a graph that was kept.

    Attributes:
        graph: its key.
        output_grads: the gradient of each of its outputs; ``None`` for an output that took no part.
        wanted: for each of its inputs, whether the caller needs the gradient.
        retain_graph: whether the outputs that take part are kept for another backward; all others are kept anyway.
        key: names this backward, and its own graph, if that is kept.
        keep: whether to keep its graph, for a higher order.
        state: of the thread that runs the caller's backward, such as autocast, which holds for nodes of the graph, too.
        streamed: the places of inputs whose gradients, and those of the workers below in a tree, are added up and sent
            in chunks, before the reply.
    """

    graph: Key
    output_grads: tuple[torch.Tensor | None, ...]
    wanted: tuple[bool, ...]
    retain_graph: bool
    key: Key
    keep: bool
    state: CallerState
    streamed: tuple[int, ...] = ()

    def run(self, worker: Worker) -> Made:
        """Do it on this worker."""
        return worker.differentiate(self)

    def plain(self) -> tuple[Any, ...]:
        """Its fields but the gradients, with the fields of the caller's state instead of the state."""
        graph, _, wanted, retain_graph, key, keep, state, *rest = vars(self).values()
        return graph, wanted, retain_graph, key, keep, state.plain(), *rest

    @classmethod
    def of_plain(
        cls,
        output_grads: tuple[torch.Tensor | None, ...],
        graph: Key,
        wanted: tuple[bool, ...],
        retain_graph: bool,
        key: Key,
        keep: bool,
        state: tuple[Any, ...],
        *rest: Any,
    ) -> Backward:
        """The inverse of :meth:`plain`."""
        return cls(graph, output_grads, wanted, retain_graph, key, keep, CallerState.of_plain(*state), *rest)


@dataclass(frozen=True)
class Release:
    """Forget graphs whose part at the caller has been freed, and values whose handles have been closed or freed."""

    keys: tuple[Key, ...]
    key: ClassVar[None] = None
    keep: ClassVar[bool] = False

    def run(self, worker: Worker) -> Made:
        """Do it on this worker."""
        return worker.release(self)


Request: TypeAlias = Call | Backward | Errand | Release
"""What a worker is asked to do, which ``run`` does. Its ``key`` names the request, and the graph from the message's
tensors to the reply's, if it asks to ``keep`` that; a request with the key ``None`` makes no graph."""
