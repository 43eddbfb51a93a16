"""The caller's autocast → the same in a backward pass, where steps are run again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

import torch

from torchopt_dist.torch_private import autocast_is_on

__all__ = ["Autocast", "current_autocast", "forget_casts"]


_AS_IT_IS = nullcontext()


@dataclass(frozen=True)
class Autocast:
    """The settings of autocast at a time."""

    states: tuple[tuple[str, bool, torch.dtype], ...]
    """Type of device, whether it was on, and to which dtype."""

    def again(self) -> AbstractContextManager[object]:
        """A context in which autocast has these settings."""
        return _AS_IT_IS if _states() == self.states else self._entered_again()

    @contextmanager
    def _entered_again(self) -> Iterator[None]:
        with ExitStack() as stack:
            for device, is_on, dtype in self.states:
                stack.enter_context(torch.autocast(device, dtype, enabled=is_on))
            yield


def current_autocast() -> Autocast:
    """The present settings of autocast."""
    return Autocast(_states())


def _states() -> tuple[tuple[str, bool, torch.dtype], ...]:
    to = torch.get_autocast_dtype
    if not autocast_is_on():
        return ("cpu", False, to("cpu")), ("cuda", False, to("cuda"))
    return tuple([(device, torch.is_autocast_enabled(device), to(device)) for device in ("cpu", "cuda")])


def forget_casts() -> None:
    """Drop the casts of the parameters of a step, since autocast keeps one for each leaf until its context ends."""
    if autocast_is_on():
        torch.clear_autocast_cache()
