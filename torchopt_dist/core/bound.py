"""A function, what its names meant at the call → a function that is called like it, now and later."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

__all__ = ["Bound"]


class Names(Protocol):
    """See :class:`~torchopt_dist.core.binding.Bindings`."""

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that the functions reach."""

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function as it was at the call."""

    def again(self, function: Any) -> Any:
        """The function that does now what this one did at the call."""

    def settle(self) -> None:
        """From now on, functions see what was noted."""

    @property
    def are_the_same(self) -> bool:
        """Whether nothing that the functions reach has changed since."""


class Bound:
    """A function that can be called like the original, now and later; its attributes are the original's."""

    __wrapped__: Callable[..., Any]

    def __init__(self, function: Callable[..., Any], bindings: Names) -> None:
        functools.update_wrapper(self, function, updated=())
        self._bindings = bindings

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it; see :meth:`Bindings.run`."""
        return self._bindings.run(self.__wrapped__, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "__wrapped__":  # of one that is being made
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any]]:
        return _itself, (self._bindings.again(self.__wrapped__),)

    @property
    def is_the_same(self) -> bool:
        """Whether all that was noted with the function is what it was at the call."""
        return self._bindings.are_the_same

    @property
    def tensors(self) -> list[Tensor]:
        """See :attr:`Bindings.tensors`."""
        return self._bindings.tensors

    def settle(self) -> None:
        """See :meth:`Bindings.settle`."""
        self._bindings.settle()


def _itself(function: Any) -> Any:
    """What another process makes of a bound function: the function, whose names are its own there."""
    return function
