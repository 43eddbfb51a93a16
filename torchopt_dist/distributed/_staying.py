"""A module whose tensors the workers have, or a handle of any value → what a message contains instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

__all__ = ["Handle", "Staying", "StayingModule"]


class Handle:
    """Stands in a message for a value that workers fetch, as long as the handle lives."""

    __slots__ = ()


class Staying(NamedTuple):
    """The tensors of a message that are not sent, since the receiver has them.

    Attributes:
        key: the key of the replica: the rank that made it, and a number.
        version: the version of its tensors: how often they have been stepped or sent again.
        places: for the number of a tensor in the message, its index among the replica's.
    """

    key: tuple[int, int]
    version: int
    places: dict[int, int]


class StayingModule(nn.Module):
    """Takes the place of its only child in calls; the function gets the child.

    Attributes:
        module: the child.
    """

    module: nn.Module

    def staying(self) -> tuple[tuple[int, int], int, Sequence[Tensor]]:
        """The key, the version and the tensors; raises if the workers' are not the same."""
        raise NotImplementedError
