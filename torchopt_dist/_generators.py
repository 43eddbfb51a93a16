"""Torch's default random generators → their states, kept and restored, and numbers drawn from them."""

from __future__ import annotations

from typing import TypeAlias

import torch

__all__ = ["States", "draw", "draw_from", "generators", "have_changed", "restore", "seed_all", "states"]

States: TypeAlias = list[tuple[torch.Generator, torch.Tensor]]
"""Each generator and its state; that of the CPU is the first."""


def generators() -> list[torch.Generator]:
    """The generators that random numbers are drawn from: those of the CPU and of the current GPU."""
    found = [torch.default_generator]
    if torch.cuda.is_initialized():
        found.append(torch.cuda.default_generators[torch.cuda.current_device()])
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
    if len(generators()) > len(before):
        return True
    return not all(torch.equal(generator.get_state(), state) for generator, state in before)


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
