"""Seconds between signs of life, seconds of patience → the policy by which workers and hosts count as lost.

Beside it, what a program that ends leaves in the store of its process group: without it a rank that never comes to the
others would just be late.
"""

from __future__ import annotations

import atexit
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch.distributed as dist

from torchopt_dist.errors import InitializationError

__all__ = ["Liveness", "ended_ranks", "note_ended"]

VARIABLE = "TODIST_LIVENESS"
SIGNS_IN_PATIENCE = 4
"""How many signs of life fit into the patience at least, so that one that comes late is no loss."""
LONGEST_SILENCE = 3600.0


@dataclass(frozen=True)
class Liveness:
    """After how long a worker or host that gives no sign of life counts as lost, though its connection has not ended.

    A network that is cut, or a process that is stopped, for less than ``patience`` causes a delay and nothing else. A
    process that has died is noticed at once, and one that computes for a long time is never taken for dead.

    Args:
        interval: seconds between two signs of life.
        patience: seconds without a sign of life after which a worker or host counts as lost.

    Raises:
        TypeError: ``interval`` or ``patience`` is not a number.
        ValueError: ``interval`` or ``patience`` is not positive and finite, or ``patience`` is less than ``interval``.
    """

    interval: float = 1.0
    patience: float = 10.0

    def __post_init__(self) -> None:
        _check_seconds("interval", self.interval)
        _check_seconds("patience", self.patience)
        if self.patience < self.interval:
            raise ValueError(f"patience must be at least interval={self.interval:g}, got {self.patience:g}")

    def __str__(self) -> str:
        return f"interval={self.interval:g},patience={self.patience:g}"

    @property
    def between_signs(self) -> float:
        """Seconds between two signs of life: ``interval``, or less if ``patience`` is hardly longer."""
        return min(self.interval, self.patience / SIGNS_IN_PATIENCE, LONGEST_SILENCE)

    @classmethod
    def parse(cls, text: str) -> Liveness:
        """Read a policy from a text such as ``interval=1,patience=30``; either number may be left out.

        Raises:
            ValueError: the text has another form.
        """
        try:
            fields = dict(part.split("=") for part in text.split(",") if part.strip())
            return cls(**{name.strip(): float(seconds) for name, seconds in fields.items()})
        except (ValueError, TypeError) as error:
            raise ValueError(f"must be as in 'interval=1,patience=10', got {text!r}: {error}") from None

    @classmethod
    def from_environment(cls, env: Mapping[str, str] = os.environ) -> Liveness:
        """Read the policy from the environment variable ``TODIST_LIVENESS``, in the form of :meth:`parse`.

        Raises:
            InitializationError: the variable has another form.
        """
        try:
            return cls.parse(env.get(VARIABLE, ""))
        except ValueError as error:
            raise InitializationError(f"the environment variable {VARIABLE} {error}") from None


def _check_seconds(name: str, seconds: Any) -> None:
    if isinstance(seconds, bool) or not isinstance(seconds, Real):
        raise TypeError(
            f"{name} must be a positive number of seconds, got {type(seconds).__name__} {seconds!r}"
        )
    if not 0 < float(seconds) < math.inf:
        raise ValueError(f"{name} must be a positive number of seconds, got {seconds!r}")


def note_ended() -> None:
    """Note in the store of the default group that this rank's program ends, for those that wait for it to come."""
    world = dist.group.WORLD if dist.is_available() else None
    if world is not None:
        with suppress(Exception):  # the store has gone with the first rank
            world.get_group_store().set(f"torchopt_dist/ended/{world.rank()}", "")


atexit.register(note_ended)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        after_in_child=lambda: atexit.unregister(note_ended)
    )  # a child's end is not its parent's


def ended_ranks(store: dist.Store, ranks: Sequence[int]) -> list[int]:
    """Those of some ranks of the default group whose programs have ended.

    Args:
        store: that of the default group, or a connection of its own to it.
        ranks: their numbers in the default group.
    """
    return [rank for rank in ranks if store.check([f"torchopt_dist/ended/{rank}"])]
