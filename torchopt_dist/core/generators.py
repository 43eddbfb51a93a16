"""Torch's default random generators → their states, kept and restored, and numbers drawn from them."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from torchopt_dist.torch_private import pending_gpu_seeds, queue_gpu_seed, set_pending_gpu_seeds

__all__ = ["States", "draw", "draw_from", "generators", "have_changed", "restore", "seed_all", "states"]

States: TypeAlias = list[tuple[Any, Any]]
"""Each generator and its state; that of the CPU is the first."""

WITH_GPUS = torch.backends.cuda.is_built()


class _UnusedGpu:
    """In the place of the generator of a GPU that is not in use yet, which torch seeds when it comes into use."""

    def get_state(self) -> Any:
        return None if torch.cuda.is_initialized() else pending_gpu_seeds()

    def set_state(self, state: Any) -> None:
        set_pending_gpu_seeds(state)

    def manual_seed(self, seed: int) -> None:
        queue_gpu_seed(seed)


_UNUSED = _UnusedGpu()


def generators() -> list[Any]:
    """The generators that random numbers are drawn from: those of the CPU and of the current GPU."""
    found: list[Any] = [torch.default_generator]
    if torch.cuda.is_initialized():
        found.append(torch.cuda.default_generators[torch.cuda.current_device()])
    elif WITH_GPUS:
        found.append(_UNUSED)
    return found


def states() -> States:
    """The generators as they are."""
    return [(generator, generator.get_state()) for generator in generators()]


def restore(before: States) -> None:
    """Let generators be as they were."""
    for generator, state in before:
        generator.set_state(state)


def seed_all(seed: int) -> None:
    """Seed the generators."""
    for generator in generators():
        generator.manual_seed(seed)


def have_changed(before: States) -> bool:
    """Whether generators are not as they were, or a GPU has come into use."""
    return not all(_same(generator.get_state(), state) for generator, state in before)


def _same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(other, torch.Tensor) else one == other


_drawn = torch.empty(1, dtype=torch.int64, device="cpu")
_drawn_number = _drawn.numpy().data


def draw(generator: torch.Generator | None = None) -> int:
    """``torch.randint(2**62, ()).item()`` without a new tensor and without a copy, which take half of its time.

    One thread at a time may call it.
    """
    _drawn.random_(0, 2**62, generator=generator)
    number: int = _drawn_number[0]
    return number


def draw_from(before: States) -> int:
    """The same of kept states, which so are as after a draw."""
    default, state = before[0]
    generator = torch.Generator().set_state(state)
    number = draw(generator)
    before[0] = default, generator.get_state()
    return number
