"""A limit's name → where it stands in the package; a test that makes one shorter names it here, and no module."""

from __future__ import annotations

from types import ModuleType

import pytest

from torchopt_dist.core import random_turns
from torchopt_dist.distributed.group import chunks, progress
from torchopt_dist.distributed.life import interruption
from torchopt_dist.distributed.membership import hub, listener, replacements
from torchopt_dist.distributed.transport import receiver, shutdown

PLACES: dict[str, ModuleType] = {
    "AGAIN_SECONDS": hub,
    "FINALLY_SECONDS": interruption,
    "GRACE_SECONDS": interruption,
    "OLD_SECONDS": replacements,
    "OVER": chunks,
    "QUIET": random_turns,
    "RETRY_SECONDS": listener,
    "SHORT_PATIENCE": random_turns,
    "SHORT_SECONDS": receiver,
    "SHUTDOWN_SECONDS": shutdown,
    "TELL_SECONDS": progress,
    "TOKEN_SECONDS": listener,
}


class Limits:
    """``limits(again_seconds=0.1)`` until the end of the test, in the process that calls it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def __call__(self, **values: float) -> None:
        for name, value in values.items():
            self._monkeypatch.setattr(PLACES[name.upper()], name.upper(), value)
