"""An iterable of batches, such as a ``DataLoader`` → the batch of a step, each read once, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

__all__ = ["Stream"]


class Stream:
    """Batches of an iterable by the numbers of their steps; the last few can be read again.

    The first batch is read here, before the steps have random numbers of their own: so a ``DataLoader`` that shuffles
    draws its order from torch's generator, as in a loop of plain torch.

    Args:
        batches: the iterable.
        steps: how many batches are needed.
        again: how many of the last batches can be read again.
    """

    def __init__(self, batches: Iterable[Any], steps: int, again: int) -> None:
        self._kind = type(batches).__name__
        self._steps = steps
        self._rest = iter(batches)
        self._read = 0
        self._last: deque[Any] = deque(maxlen=max(again, 1))
        if steps > 0:
            self._next()

    def __call__(self, number: int) -> Any:
        """The batch of a step.

        Raises:
            ValueError: the iterable has ended before.
            RuntimeError: the batch has been read, and more than the last few have been read since.
        """
        while number >= self._read:
            self._next()
        place = number - self._read  # from the end
        if -place > len(self._last):
            raise RuntimeError(
                f"`batches`, a {self._kind}, can be read once, and the batch of step {number} is needed again: give a "
                "list"
            )
        return self._last[place]

    def _next(self) -> None:
        try:
            self._last.append(next(self._rest))
        except StopIteration:
            raise ValueError(
                f"`batches` must have one batch for each step: the {self._kind} ended at step {self._read} of "
                f"{self._steps}"
            ) from None
        self._read += 1
