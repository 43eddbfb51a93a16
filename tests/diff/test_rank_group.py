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
from torchopt_dist._watched_group import WatchedGroup
from torchopt_dist.diff.adjoints._rank_group import RankGroup, Signs

QUICK = todist.Liveness(interval=0.02, patience=0.1)


def waited_for(condition: Callable[[], Any]) -> bool:
    """Whether it is true within a long time."""
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return bool(condition())


def nothing() -> None:
    """Do nothing."""


def test_a_silent_rank_is_lost_and_the_others_are_not() -> None:
    store, aborted = dist.HashStore(), threading.Event()
    one, other = Signs(store, 0, 3, QUICK), Signs(store, 1, 3, QUICK)
    one.watch(aborted.set)
    other.watch(nothing)
    try:
        assert waited_for(lambda: one.lost and other.lost and aborted.is_set())
        assert "rank 2 has given no sign of life for 0.1 s" in str(one.lost)
        assert one.lost == other.lost
        with pytest.raises(RuntimeError, match="rank 2 has given no sign of life"):
            one.check()
    finally:
        one.end()
        other.end()


def test_a_collective_that_is_queued_on_a_gpu_ends_with_an_error() -> None:
    aborted = threading.Event()
    queued = SimpleNamespace(wait=nothing, is_completed=lambda: False)
    nccl = SimpleNamespace(allreduce=lambda tensors: queued, abort=aborted.set)
    signs = Signs(dist.HashStore(), 0, 2, QUICK)
    group = WatchedGroup(0, 2, 0, {"cuda": nccl, "cpu": nccl}, signs.check)
    ranks = RankGroup(group, signs)
    flat: Any = SimpleNamespace(is_cuda=True)
    signs.watch(group.fail)
    with (
        pytest.raises(todist.errors.CollectiveError, match="rank 1 has given no sign of life"),
        ranks.failing(),
    ):
        ranks.all_reduce(flat)  # it is queued, and the loop goes on
    assert waited_for(aborted.is_set)
    assert not ranks.is_open
    with pytest.raises(todist.errors.CollectiveError, match="was closed after an error"):
        ranks.all_reduce(torch.ones(2))


def test_a_rank_that_does_not_come_to_a_loop_is_named() -> None:
    store = dist.HashStore()
    one, other = Signs(store, 0, 2, QUICK), Signs(store, 1, 2, QUICK)
    with one.coming():
        one.check()  # it has just begun to wait
        with pytest.warns(
            RuntimeWarning, match=r"rank 1 has not come to a loop .* for 0\.1 s, and rank 0 waits"
        ):
            assert waited_for(lambda: time.sleep(0.05) or one.check() or one._waits_since is None)
    with other.coming(), one.coming(), pytest.warns(RuntimeWarning, match="rank 1 has not come"):
        assert waited_for(lambda: one.check() or one._waits_since is None)  # to the second one
    with other.coming(), other.coming(), one.coming():  # now it has
        assert waited_for(lambda: one.check() or one._waits_since is None)


def test_an_error_is_left_for_the_others() -> None:
    store = dist.HashStore()
    one, other = (Signs(store, rank, 2, QUICK) for rank in range(2))
    one.note_error("KeyError: 'no such example'")
    assert other.errors() == ["rank 0 raised KeyError: 'no such example'"]
