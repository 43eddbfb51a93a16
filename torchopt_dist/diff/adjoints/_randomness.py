"""A seed → torch's generators seeded for each step of a loop, and as they were after it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from torchopt_dist._torch_private import outside_of_transforms, transforms_are_active

__all__ = ["draw_seed", "generators", "kept_generators", "seed_step"]


def draw_seed() -> int:
    """A number from the caller's generator, from which the seeds of the steps are derived."""
    # `vmap` refuses random numbers.
    with outside_of_transforms() if transforms_are_active() else nullcontext():
        return int(torch.randint(2**62, ()).item())


def seed_step(seed: int, number: int) -> None:
    """Seed the generators for one step."""
    for generator in generators():
        generator.manual_seed((seed + number * 0x9E3779B97F4A7C15) % 2**63)


@contextmanager
def kept_generators() -> Iterator[None]:
    """Restore the states of the generators when the context is left."""
    before = [(generator, generator.get_state()) for generator in generators()]
    try:
        yield
    finally:
        for generator, state in before:
            generator.set_state(state)


def generators() -> list[torch.Generator]:
    """The generators that random numbers are drawn from: those of the CPU and of the current GPU."""
    found = [torch.default_generator]
    if torch.cuda.is_initialized():
        found.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return found
