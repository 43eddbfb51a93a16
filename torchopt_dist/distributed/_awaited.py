"""The future of an asynchronous call: a thread that waits for it lends its process to other work meanwhile."""

from __future__ import annotations

from typing import TypeVar

from torch.futures import Future

from torchopt_dist._random_turns import lent
from torchopt_dist.distributed._group import Group

__all__ = ["Awaited"]

T = TypeVar("T")


class Awaited(Future[T]):
    """A ``torch.futures.Future``; :func:`torch.futures.wait_all` waits for it without this class, and lends nothing.

    Args:
        group: the group of the call.
    """

    def __init__(self, group: Group) -> None:
        super().__init__()
        self._group = group

    def wait(self) -> T:
        """Wait for the result, and return it or raise the exception that the call ended with."""
        if not self.done():
            with self._group.retries.waiting(), lent():
                super().wait()
        return super().wait()
