"""What workers say to each other: three requests and the reply to each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from torchopt_dist._serialized_exception import SerializedException
from torchopt_dist.distributed._payload import Payload

__all__ = ["Backward", "Call", "Key", "Release", "Reply", "Request"]

Key: TypeAlias = tuple[int, int]
"""Names a graph that a worker keeps: the caller's rank and a number that the caller never uses again."""


@dataclass(frozen=True)
class Call:
    """Run a payload.

    Attributes:
        payload: what to run.
        keep_as: key under which to keep the graph from the message's tensors to the results; ``None`` to keep none.
    """

    payload: Payload
    keep_as: Key | None


SECOND_TIME = (
    "Trying to backward through the graph of a remote call a second time: give retain_graph=True the first"
)
"""What both sides say to a backward through what an earlier one has used up."""


@dataclass(frozen=True)
class Backward:
    """Differentiate a graph that was kept.

    Attributes:
        graph: its key.
        output_grads: the gradient of each of its outputs; ``None`` for an output that took no part.
        retain_graph: whether those that take part are to be kept for another backward; the others are.
        keep_as: key under which to keep the graph of this backward, for a higher order; ``None`` to keep none.
    """

    graph: Key
    output_grads: tuple[torch.Tensor | None, ...]
    retain_graph: bool
    keep_as: Key | None


@dataclass(frozen=True)
class Release:
    """Forget graphs whose callers have forgotten theirs.

    Attributes:
        graphs: their keys.
    """

    graphs: tuple[Key, ...]


Request: TypeAlias = Call | Backward | Release


@dataclass(frozen=True)
class Reply:
    """The answer to a request.

    Attributes:
        values: one for each task of a call; one for each input of a graph, ``None`` where it has no gradient.
        failure: the exception that ended the request, if one did.
    """

    values: list[Any] = field(default_factory=list)
    failure: SerializedException | None = None
