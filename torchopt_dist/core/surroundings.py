"""Where a function runs → a context in which it runs again as it did there.

That is what decides a function's values beside its arguments: autocast, the default dtype and device, the functions
that are in the places of torch's, and the random numbers that it draws.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import NamedTuple

import torch

from torchopt_dist.core.functional import Replacements
from torchopt_dist.core.generators import States, have_changed, restore, states
from torchopt_dist.core.random_turns import change_generators
from torchopt_dist.torch_private import autocast_is_on, entrances_for_tensors

__all__ = ["Modes", "Surroundings", "forget_casts", "modes"]

_AS_IT_IS = nullcontext()


class Modes(NamedTuple):
    """The default dtype and device, and the settings of autocast, of a thread at a time.

    A backward pass on a GPU is in a thread of torch's, which has none of them.
    """

    dtype: torch.dtype
    device: torch.device
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    """Type of device, whether it was on, and to which dtype."""

    def again(self, *, keeps_casts: bool = True) -> AbstractContextManager[object]:
        """A context with these modes.

        Args:
            keeps_casts: whether autocast casts a leaf once; what it has cast then belongs to the graph of that.
        """
        now = modes()
        if now == self and (keeps_casts or not any(is_on for _, is_on, _ in now.autocast)):
            return _AS_IT_IS
        return self._entered(now, keeps_casts=keeps_casts)

    @contextmanager
    def _entered(self, now: Modes, *, keeps_casts: bool) -> Iterator[None]:
        with ExitStack() as stack:
            if now.dtype != self.dtype:
                stack.callback(torch.set_default_dtype, now.dtype)
                torch.set_default_dtype(self.dtype)
            if now.device != self.device:
                stack.enter_context(self.device)
            for (device, is_on, dtype), (_, was_on, _) in zip(self.autocast, now.autocast, strict=True):
                if is_on or was_on:
                    stack.enter_context(torch.autocast(device, dtype, is_on, cache_enabled=keeps_casts))
            yield


def modes() -> Modes:
    """Those of this thread."""
    to, is_on = torch.get_autocast_dtype, autocast_is_on()
    return Modes(
        torch.get_default_dtype(),
        torch.get_default_device(),
        tuple([(kind, is_on and torch.is_autocast_enabled(kind), to(kind)) for kind in ("cpu", "cuda")]),
    )


def forget_casts() -> None:
    """Drop the casts of the parameters of a step, since autocast keeps one for each leaf until its context ends."""
    if autocast_is_on():
        torch.clear_autocast_cache()


class Surroundings:
    """Those of a function that is about to run for the first time, in this thread."""

    def __init__(self) -> None:
        self._modes = modes()
        self._replaced = Replacements(entrances_for_tensors())
        self._states: States | None = states()

    def settle(self) -> None:
        """The function has run: what it has not drawn from need not be kept."""
        if self._states is not None and not have_changed(self._states):
            self._states = None

    @contextmanager
    def again(self) -> Iterator[None]:
        """A context to run the function in again; the generators are as before in the end."""
        with ExitStack() as stack:
            # What is cast is not kept: it would belong to a graph that ends here.
            stack.enter_context(self._modes.again(keeps_casts=False))
            stack.enter_context(self._replaced.again())
            if self._states is not None:
                stack.callback(change_generators, restore, states())
                change_generators(restore, self._states)
            yield
