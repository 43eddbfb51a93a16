"""A run of torch's autograd engine → an object that it holds until it ends; one that has failed → what it has left.

Torch calls a run's callbacks where it ends well, and only frees them where it fails.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Generic, TypeVar

import torch

from torchopt_dist.torch_private.engine import grad_of_loss
from torchopt_dist.torch_private.lookup import find

T = TypeVar("T")


class _Held(Generic[T]):
    """Is called by a run of the engine at its end; by one that fails it is freed only."""

    def __init__(self) -> None:
        self.thing: T | None = None
        self._thread: int | None = threading.get_ident()

    def __call__(self) -> None:
        self.thing = self._thread = None

    def __del__(self) -> None:
        if self._thread == threading.get_ident():
            forget_failed_runs()

    def take(self) -> T | None:
        thing, self.thing = self.thing, None
        return thing


def held_by_run(make: Callable[[], T]) -> Callable[[], T | None]:
    """Let the backward that runs in this thread hold an object until it ends, in whatever way.

    If it fails, what else it has left is freed, too; see :func:`forget_failed_runs`. Without the name, what is returned
    holds the object.

    Args:
        make: makes the object.

    Returns:
        What takes the object back; ``None`` if it has been taken, or the backward has ended.
    """
    held, runs = _Held[T](), False
    call_at_end = find("autograd.Variable._execution_engine.queue_callback")
    if call_at_end is not None:
        with suppress(RuntimeError):  # there is no backward: somebody has called a node
            call_at_end(held)
            runs = True
    if not runs:
        held()
    held.thing = make()
    return partial(_take, weakref.ref(held)) if runs else held.take


def _take(held: weakref.ref[_Held[T]]) -> T | None:
    found = held()
    return None if found is None else found.take()


class _Told:
    """Is called by a run of the engine at its end; by one that fails it is freed only, and calls a function."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function: Callable[[], object] | None = function

    def __call__(self) -> None:
        self._function = None

    def __del__(self) -> None:
        if self._function is not None:
            self._function()


def when_run_fails(function: Callable[[], object]) -> None:
    """Let a function be called if the backward that runs in this thread fails, wherever it does.

    Without the name it is not called: other ranks then wait for this one, as for one that is late.
    """
    call_at_end = find("autograd.Variable._execution_engine.queue_callback")
    told = _Told(function)
    if call_at_end is not None:
        with suppress(RuntimeError):  # there is no backward: somebody has called a node
            call_at_end(told)
            return
    told()


def forget_failed_runs() -> None:
    """Free what backward passes of this thread that have failed left in the engine's queue.

    These are nodes that were ready to run, with their gradients and all of the graph behind them. Torch keeps them for
    the next backward pass of the thread, which drops them first; here that is one of a single leaf.
    """
    with suppress(Exception):  # such as a lack of memory
        leaf = torch.zeros((), requires_grad=True, device="cpu")
        grad_of_loss(leaf, [leaf], leaf.detach())
