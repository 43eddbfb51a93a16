from __future__ import annotations

from types import SimpleNamespace

import pytest

from torchopt_dist.distributed import _group


@pytest.fixture
def workers(monkeypatch):
    """``workers(n)`` makes a group of n; three at first."""

    def make(size):
        names = tuple(f"worker{rank}" for rank in range(size))
        monkeypatch.setattr(_group, "_group", SimpleNamespace(names=names, ending=False))

    make(3)
    return make
