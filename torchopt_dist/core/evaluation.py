"""A task called under ``torch.no_grad()`` → its values, without gradients; one that adapts inside runs with them.

A task under ``torch.no_grad()`` starts without gradients. If it makes a ``MetaOptimizer``, it starts again with
gradients enabled, since what it has computed so far has no graph that an inner loop could use. A task is a function of
its arguments and its seed, so the second start gives the same values.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torchopt_dist import pytree

__all__ = ["NormalTensors", "evaluate", "is_evaluating", "need_gradients", "with_gradients"]

T = TypeVar("T")


class _Stage(enum.Enum):
    OUTSIDE = enum.auto()
    """No task under ``torch.no_grad()`` runs."""
    BEGUN = enum.auto()
    """One runs without gradients, and can be begun anew."""
    AGAIN = enum.auto()
    """One runs with gradients, and its values will be detached."""


_stage: ContextVar[_Stage] = ContextVar("stage", default=_Stage.OUTSIDE)


class _GradientsNeededError(BaseException):
    """Ends a task that has to start again; not an ``Exception``, so that a task does not catch it."""


def need_gradients() -> None:
    """Declare that the code from here on takes gradients: a task that runs without them starts again."""
    if _stage.get() is _Stage.BEGUN and not torch.is_grad_enabled():
        raise _GradientsNeededError


def is_evaluating() -> bool:
    """Whether a task runs with gradients whose values will be detached, so that nothing outlives a step."""
    return _stage.get() is _Stage.AGAIN


def evaluate(run: Callable[[], T]) -> T:
    """Run tasks whose caller wants no gradients.

    Args:
        run: runs the tasks; is called twice where one of them takes gradients.

    Returns:
        What ``run`` returns, a tree; its tensors have no graph.
    """
    token = _stage.set(_Stage.BEGUN)
    try:
        return run()
    except _GradientsNeededError:
        _stage.set(_Stage.AGAIN)
        with NormalTensors() if torch.is_inference_mode_enabled() else nullcontext(), with_gradients():
            values: T = pytree.map_tensors(torch.detach, run())
            return values
    finally:
        _stage.reset(token)


@contextmanager
def with_gradients(record: bool = True) -> Iterator[None]:
    """A context in which graphs are recorded, or not, and tensors are ordinary ones under ``inference_mode()`` too."""
    with torch.inference_mode(False), torch.set_grad_enabled(record):
        yield


class NormalTensors(TorchFunctionMode):
    """A context in which operations take tensors made under ``torch.inference_mode()`` as normal ones."""

    def __init__(self) -> None:
        super().__init__()
        self._clones: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*pytree.map_tensors(self._normal, args), **pytree.map_tensors(self._normal, kwargs or {}))

    def _normal(self, tensor: Tensor) -> Tensor:
        if not tensor.is_inference():
            return tensor
        if id(tensor) not in self._clones:
            self._clones[id(tensor)] = tensor, tensor.clone()  # the original is kept, and with it its id
        return self._clones[id(tensor)][1]
