"""A seed → torch's generators seeded for each step of a loop, and as they were after it."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from torchopt_dist.core.generators import WITH_GPUS, restore, seed_all, states
from torchopt_dist.core.random_turns import change_generators

__all__ = ["kept_generators", "seed_step"]


def seed_step(seed: int, number: int) -> None:
    """Seed the generators for one step."""
    own = (seed + number * 0x9E3779B97F4A7C15) % 2**63
    change_generators(seed_all if WITH_GPUS else torch.default_generator.manual_seed, own)


def kept_generators() -> AbstractContextManager[None]:
    """Restore the states of the generators when the context is left."""
    return _Kept()


class _Kept:
    """As a class, which is entered and left sooner than a generator with ``contextmanager``."""

    def __enter__(self) -> None:
        self._before = states()

    def __exit__(self, *exception: object) -> None:
        change_generators(restore, self._before)
