"""The signals that end workers."""

from __future__ import annotations

import signal

__all__ = ["INTERRUPT", "TERMINATED"]

INTERRUPT = signal.SIGRTMAX - 1 if hasattr(signal, "SIGRTMAX") else signal.SIGTERM
"""The signal by which a launch's agent interrupts a worker: SIGINT is left to the worker's function. Launches need
Linux, and other systems may have no such signal."""
TERMINATED = 128 + signal.SIGTERM
"""The exit code of a program that has ended in order on SIGTERM; shells show the same where it ended by the signal."""
