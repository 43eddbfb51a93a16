"""Objects with a state → files from which a program continues after a crash."""

from __future__ import annotations

from torchopt_dist.checkpoint.checkpointer import Checkpointer, Restored

__all__ = ["Checkpointer", "Restored"]
