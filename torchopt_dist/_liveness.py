"""How often, and how long → the one policy by which all judge who is alive: workers, hosts, and their connections."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from torchopt_dist.errors import InitializationError

__all__ = ["Liveness"]

VARIABLE = "TODIST_LIVENESS"
SIGNS_IN_PATIENCE = 4
"""How many signs of life fit into the patience at least, so that one that comes late is no loss."""
LONGEST_SILENCE = 3600.0


@dataclass(frozen=True)
class Liveness:
    """How workers find out that another one is gone although its connection has not ended.

    A network that is cut for less than ``patience``, or a process that is stopped for less, is not noticed but for the
    delay. A process that has died is noticed at once, and one that computes for long is never taken for dead.

    Args:
        interval: seconds between two looks at the others.
        patience: seconds without an answer, or stopped, after which a worker is lost.

    Raises:
        TypeError: one is no number.
        ValueError: a number is not positive and finite, or ``patience`` is less than ``interval``.
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
        """Seconds between two signs of life: ``interval``, or less if the patience is as short."""
        return min(self.interval, self.patience / SIGNS_IN_PATIENCE, LONGEST_SILENCE)

    @classmethod
    def parse(cls, text: str) -> Liveness:
        """The policy that a text asks for, as in ``interval=1,patience=30``; either may be left out.

        Raises:
            ValueError: the text is anything else.
        """
        try:
            fields = dict(part.split("=") for part in text.split(",") if part.strip())
            return cls(**{name.strip(): float(seconds) for name, seconds in fields.items()})
        except (ValueError, TypeError) as error:
            raise ValueError(f"must be as in 'interval=1,patience=10', got {text!r}: {error}") from None

    @classmethod
    def from_environment(cls, env: Mapping[str, str] = os.environ) -> Liveness:
        """The policy that the variable ``TODIST_LIVENESS`` of an environment asks for, as :meth:`parse` reads it.

        Raises:
            InitializationError: the variable holds anything else.
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
