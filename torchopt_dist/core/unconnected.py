"""Tensors that an inner loop uses or makes, and to which a result may not be connected → what a worker is told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from torch import Tensor

__all__ = ["Unconnected", "is_noted", "note_unconnected", "unconnected"]


class Unconnected(NamedTuple):
    """Tensors that get no gradient, unless something beside the loop uses them."""

    tensors: Sequence[Tensor]
    """The tensors."""
    why: str = ""
    """A clause with the reason and the remedy."""
    moved: bool = False
    """Whether they are parameters that a step has made, on one of which a result is to depend."""


_noted: ContextVar[list[Unconnected] | None] = ContextVar("noted", default=None)


@contextmanager
def unconnected() -> Iterator[list[Unconnected]]:
    """A context that yields what the inner loops and steps in it note."""
    found: list[Unconnected] = []
    before = _noted.set(found)
    try:
        yield found
    finally:
        _noted.reset(before)


def is_noted() -> bool:
    """Whether there is a context around this that is to be told."""
    return _noted.get() is not None


def note_unconnected(what: Unconnected) -> None:
    """Note it for the context around this, if there is one."""
    noted = _noted.get()
    if noted is not None:
        noted.append(what)
