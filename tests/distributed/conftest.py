from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.distributed.memberships import Lines
from torchopt_dist.distributed.group import group
from torchopt_dist.distributed.membership.hub import START


@pytest.fixture
def workers(monkeypatch):
    """``workers(n)`` makes a group of n; three at first."""

    def make(size):
        names = tuple(f"worker{rank}" for rank in range(size))
        monkeypatch.setattr(group, "_group", SimpleNamespace(names=names, ending=False))

    make(3)
    return make


@pytest.fixture
def lines():
    """``lines(*names)`` makes the memberships of so many ranks; they have met, unless ``joined=False``."""
    made = []

    def make(*names, joined=True, on_loss="end", **about):
        made.append(Lines(names, on_loss, **about))
        if joined:
            for future in made[-1].join():
                future.result()
        if on_loss != "end":
            for future in [
                made[-1].barrier(rank, range(len(names)), purpose=START) for rank in range(len(names))
            ]:
                future.result()
        return made[-1]

    yield make
    for line in made:
        line.close()
