"""The caller's thread → what of its state decides how a function computes, to be applied on a worker."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

import torch

__all__ = ["CallerState", "ThreadSettings"]


@dataclass(frozen=True)
class CallerState:
    """The part of the caller's state that decides how its function computes.

    Attributes:
        autocast: for each device type with autocast switched on, the dtype it casts to.
        default_dtype: torch keeps one for the whole process, so dtypes get mixed up on a worker that answers calls with
            several at a time, or whose ``main`` changes it meanwhile.
    """

    grad_enabled: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    default_dtype: torch.dtype

    @classmethod
    def capture(cls) -> CallerState:
        """Read the state of this thread."""
        autocast: tuple[tuple[str, torch.dtype], ...] = ()
        if torch.is_autocast_enabled("cpu"):
            autocast = (("cpu", torch.get_autocast_dtype("cpu")),)
        if torch.is_autocast_enabled("cuda") and torch.cuda.is_available():
            autocast = (*autocast, ("cuda", torch.get_autocast_dtype("cuda")))
        return _state(torch.is_grad_enabled(), autocast, torch.get_default_dtype())

    def plain(self) -> tuple[bool, tuple[tuple[str, str], ...], str]:
        """Its fields, dtypes by their names."""
        autocast = tuple((device, _name(dtype)) for device, dtype in self.autocast)
        return self.grad_enabled, autocast, _name(self.default_dtype)

    @classmethod
    def of_plain(
        cls, grad_enabled: bool, autocast: tuple[tuple[str, str], ...], default_dtype: str
    ) -> CallerState:
        """The inverse of :meth:`plain`."""
        named = tuple((device, getattr(torch, name)) for device, name in autocast)
        return cls(grad_enabled, named, getattr(torch, default_dtype))

    def applied(self) -> AbstractContextManager[object]:
        """Context manager, to be entered at once: until it is left this thread computes under this state."""
        if not self.autocast and torch.get_default_dtype() == self.default_dtype:
            return torch.set_grad_enabled(self.grad_enabled)
        return self._applied()

    @contextmanager
    def _applied(self) -> Iterator[None]:
        before = torch.get_default_dtype()
        with torch.set_grad_enabled(self.grad_enabled), ExitStack() as stack:
            for device, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype))
            if before != self.default_dtype:
                torch.set_default_dtype(self.default_dtype)
                stack.callback(torch.set_default_dtype, before)
            yield


_state = functools.lru_cache(maxsize=64)(CallerState)
"""Makes states; two that are equal are one object."""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class ThreadSettings:
    """Settings that torch keeps for each thread, captured in one thread and applied in others."""

    device: torch.device
    gpu: int | None

    @classmethod
    def capture(cls) -> ThreadSettings:
        """Read the settings of this thread."""
        gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        return cls(torch.get_default_device(), gpu)

    def are_chosen(self) -> bool:
        """Whether they differ from those of a new thread."""
        return self.device != torch.device("cpu") or bool(self.gpu)

    def apply(self) -> None:
        """Apply the settings to this thread."""
        if self.device != torch.get_default_device():
            torch.set_default_device(self.device)
        if self.gpu is not None:
            torch.cuda.set_device(self.gpu)
