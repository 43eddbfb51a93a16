"""A module whose tensors the workers have → what a message says in the place of these tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

__all__ = ["Staying", "StayingModule"]


class Staying(NamedTuple):
    """Those of a message's tensors that are not sent, since the receiver has them.

    Attributes:
        key: of the replica: the rank where it was made, and a number.
        version: of its tensors: how often they have been stepped or sent anew.
        places: for the number of a tensor in the message, its place among the replica's.
    """

    key: tuple[int, int]
    version: int
    places: dict[int, int]


class StayingModule(nn.Module):
    """Stands for its only child in calls, where the function gets the child.

    Attributes:
        module: the child.
    """

    module: nn.Module

    def staying(self) -> tuple[tuple[int, int], int, Sequence[Tensor]]:
        """The key, the version and the tensors; raises if the workers' are not the same."""
        raise NotImplementedError
