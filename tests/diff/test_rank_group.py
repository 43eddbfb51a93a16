"""A rank that is silent is lost, and where torch would wait for it, its group is aborted; NCCL's is stood in for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchopt_dist as todist
from torchopt_dist.diff.adjoints import _rank_group
from torchopt_dist.diff.adjoints._rank_group import RankGroup, Signs

QUICK = todist.Liveness(interval=0.02, patience=0.1)


def waited_for(condition: Callable[[], Any]) -> bool:
    """Whether it is true within a long time."""
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return bool(condition())


def test_a_silent_rank_is_lost_and_the_others_are_not() -> None:
    store, aborted = dist.HashStore(), threading.Event()
    one = Signs(store, 0, 3, QUICK, aborted.set)
    other = Signs(store, 1, 3, QUICK, None)
    try:
        assert waited_for(lambda: one.lost and other.lost and aborted.is_set())
        assert "rank 2 has given no sign of life for 0.1 s" in str(one.lost)
        assert one.lost == other.lost
    finally:
        one.end()
        other.end()


class Nccl:
    """A process group of two whose collectives are queued, and never done; the other rank gives no sign of life."""

    def __init__(self) -> None:
        self.aborted = threading.Event()
        self.work = SimpleNamespace(wait=lambda: None, is_completed=lambda: False)

    def get_group_store(self) -> Any:
        """A store."""
        return dist.HashStore()

    def abort(self) -> None:
        """Note it."""
        self.aborted.set()


def test_a_collective_that_is_queued_on_a_gpu_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Nccl()
    destroyed: list[Any] = []
    stand_in = SimpleNamespace(
        get_rank=lambda group: 0,
        get_world_size=lambda group: 2,
        get_backend_config=lambda group: "cuda:nccl",
        PrefixStore=dist.PrefixStore,
        all_reduce=lambda flat, group, async_op: group.work,
        destroy_process_group=destroyed.append,
    )
    monkeypatch.setattr(_rank_group, "dist", stand_in)
    monkeypatch.setenv("TODIST_LIVENESS", "interval=0.02,patience=0.1")
    monkeypatch.setattr(RankGroup, "exchanged", lambda self, value: [value] * 2)
    ranks = RankGroup(group)
    with (
        pytest.raises(todist.errors.CollectiveError, match="rank 1 has given no sign of life"),
        ranks.failing(),
    ):
        ranks.all_reduce(torch.ones(2))  # it is queued, and the loop goes on
    assert waited_for(group.aborted.is_set)
    assert destroyed == [group]
    assert not ranks.is_open
    with pytest.raises(todist.errors.CollectiveError, match="rank 1 has given no sign of life"):
        ranks.all_reduce(torch.ones(2))


def test_an_error_is_left_for_the_others() -> None:
    store = dist.HashStore()
    one, other = (Signs(store, rank, 2, QUICK, None) for rank in range(2))
    try:
        one.note_error("KeyError: 'no such example'")
        assert other.errors() == ["rank 0 raised KeyError: 'no such example'"]
    finally:
        one.end()
        other.end()
