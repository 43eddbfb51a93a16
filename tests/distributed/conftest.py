from __future__ import annotations

import pytest

from torchopt_dist.distributed.world import roster


@pytest.fixture
def workers(monkeypatch):
    """``workers(n)`` makes a group of n; three at first."""

    def make(size):
        monkeypatch.setattr(roster, "names", tuple(f"worker{rank}" for rank in range(size)))

    make(3)
    return make
