"""Torch's default random generators → their states, kept and restored, and seeds drawn from them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeAlias

import torch

__all__ = [
    "States",
    "draw",
    "draw_returnable",
    "generators",
    "have_changed",
    "never_drawn",
    "restore",
    "states",
]

States: TypeAlias = list[tuple[torch.Generator, torch.Tensor]]
"""Each generator and its state."""


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


def have_changed(before: States) -> bool:
    """Whether generators are not as they were."""
    return not all(torch.equal(generator.get_state(), state) for generator, state in before)


def never_drawn() -> bool:
    """Whether the generators are as seeding has left them."""
    for generator in generators():
        fresh = torch.Generator(generator.device).manual_seed(generator.initial_seed())
        if not torch.equal(fresh.get_state(), generator.get_state()):
            return False
    return True


_drawn = torch.empty(1, dtype=torch.int64, device="cpu")
_drawn_number = _drawn.numpy().data
_one_at_a_time = threading.Lock()


def draw() -> int:
    """``torch.randint(2**62, ()).item()`` without a new tensor and without a copy, which take half of its time."""
    with _one_at_a_time:
        _drawn.random_(0, 2**62)
        number: int = _drawn_number[0]
        return number


def draw_returnable() -> tuple[int, Callable[[], None]]:
    """What :func:`draw` returns, and a function that lets the generator be as before, unless more was drawn since."""
    generator = torch.default_generator
    with _one_at_a_time:
        before = generator.get_state()
        _drawn.random_(0, 2**62)
        number: int = _drawn_number[0]
        after = generator.get_state()

    def give_back() -> None:
        with _one_at_a_time:
            if torch.equal(generator.get_state(), after):
                generator.set_state(before)

    return number, give_back
