"""How often, and how long → the one policy by which all judge who is alive: workers, hosts, and their connections."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from torchopt_dist.errors import InitializationError

__all__ = ["Liveness"]

VARIABLE = "TODIST_LIVENESS"


@dataclass(frozen=True)
class Liveness:
    """How workers find out that another one is gone although its connection has not ended.

    A network that is cut for less than ``patience``, or a process that is stopped for less, is not noticed but for the
    delay. A process that has died is noticed at once, and one that computes for long is never taken for dead.

    Args:
        interval: seconds between two looks at the others.
        patience: seconds without an answer, or stopped, after which a worker is lost.

    Raises:
        ValueError: a number is not positive and finite, or ``patience`` is less than ``interval``.
    """

    interval: float = 1.0
    patience: float = 10.0

    def __post_init__(self) -> None:
        for name, seconds in (("interval", self.interval), ("patience", self.patience)):
            if not 0 < seconds < math.inf:
                raise ValueError(f"{name} must be a positive number of seconds, got {seconds!r}")
        if self.patience < self.interval:
            raise ValueError(f"patience must be at least interval={self.interval:g}, got {self.patience:g}")

    @classmethod
    def from_environment(cls) -> Liveness:
        """The policy that ``TODIST_LIVENESS`` asks for, as in ``interval=1,patience=30``; either may be left out.

        Raises:
            InitializationError: the variable holds anything else.
        """
        text = os.environ.get(VARIABLE, "")
        try:
            fields = dict(part.split("=") for part in text.split(",") if part.strip())
            return cls(**{name.strip(): float(seconds) for name, seconds in fields.items()})
        except (ValueError, TypeError) as error:
            raise InitializationError(
                f"the environment variable {VARIABLE} must be as in 'interval=1,patience=10', got {text!r}: {error}"
            ) from None
