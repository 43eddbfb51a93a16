"""Where a function runs → a context in which it runs again as it did there.

That is what decides a function's values beside its arguments: autocast, the default dtype and device, the functions
that are in the places of torch's, and the random numbers that it draws.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from torchopt_dist.core.functional import Replacements
from torchopt_dist.core.generators import States, have_changed, restore, states
from torchopt_dist.core.random_turns import change_generators
from torchopt_dist.torch_private import entrances_for_tensors

__all__ = ["Surroundings", "autocast"]


class Surroundings:
    """Those of a function that is about to run for the first time, in this thread."""

    def __init__(self) -> None:
        self._dtype = torch.get_default_dtype()
        self._device = torch.get_default_device()
        self._autocast = autocast()
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
            if torch.get_default_dtype() != self._dtype:
                stack.callback(torch.set_default_dtype, torch.get_default_dtype())
                torch.set_default_dtype(self._dtype)
            if torch.get_default_device() != self._device:
                stack.enter_context(self._device)
            for device, is_enabled, dtype in self._autocast:
                # What is cast is not kept: it would belong to a graph that ends here.
                if is_enabled or torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, dtype, is_enabled, cache_enabled=False))
            stack.enter_context(self._replaced.again())
            if self._states is not None:
                stack.callback(change_generators, restore, states())
                change_generators(restore, self._states)
            yield


def autocast() -> list[tuple[str, bool, torch.dtype]]:
    """For each kind of device whether it is on, and its dtype."""
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    return [(name, torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)) for name in devices]
