"""A rank that is silent is lost, and where torch would wait for it, its group is aborted; NCCL's is stood in for."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

import torchopt_dist as todist
from tests.processes import ROOT, finish, free_port, start_python
from torchopt_dist.collectives.watched_group import WatchedGroup
from torchopt_dist.diff.adjoints import _agreement
from torchopt_dist.diff.adjoints._rank_group import RankGroup
from torchopt_dist.diff.adjoints._signs import Signs

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
    for signs in (one, other):
        with signs.coming():
            signs.begin_message()
    with one.coming():
        one.begin_message()
        with pytest.warns(RuntimeWarning, match="rank 1 has not come"):  # to the second one
            assert waited_for(lambda: one.check() or one._waits_since is None)
    with other.coming(), one.coming():
        other.begin_message()  # now it has
        assert waited_for(lambda: one.check() or one._waits_since is None)


def test_a_rank_that_never_comes_to_the_first_loop_is_an_error() -> None:
    store, limit = dist.HashStore(), timedelta(seconds=0.3)
    patient = todist.Liveness(interval=0.02, patience=60)
    ones = [Signs(store, rank, 3, patient) for rank in range(3)]
    with pytest.raises(todist.errors.CollectiveError, match="rank 2 has ended without coming to a loop"):
        ones[0].await_all(timedelta(hours=1), lambda: [2])
    threading.Timer(0.1, ones[1]._give).start()
    with pytest.raises(
        todist.errors.CollectiveError,
        match=r"rank 2 has not come to a loop with `parallel` for 0:00:00.3\d*, the time-out of the process group",
    ):
        ones[0].await_all(limit, list)
    with pytest.raises(todist.errors.CollectiveError, match=r"in vain: rank 0 raised .* rank 2 has not come"):
        ones[2].await_all(limit, list)  # who comes late


def test_a_rank_that_does_not_come_to_a_message_is_named() -> None:
    store, quick = dist.HashStore(), todist.Liveness(interval=0.02, patience=60)
    work = SimpleNamespace(wait=nothing, is_completed=lambda: False)
    nccl = SimpleNamespace(allreduce=lambda tensors: work, abort=nothing)
    ones = [Signs(store, rank, 3, quick) for rank in range(3)]
    limit = timedelta(seconds=0.3)
    group = WatchedGroup(0, 3, 0, {"cuda": nccl, "cpu": nccl}, ones[0].check, limit)
    ranks, flat = RankGroup(group, ones[0]), SimpleNamespace(is_cuda=True)
    for signs in ones:
        signs.watch(nothing)
    ones[1].begin_message()
    with (
        pytest.raises(todist.errors.CollectiveError, match=r"rank 2 has not come to it for 0:00:00.3"),
        ranks.failing(),
    ):
        ranks.all_reduce(cast("Any", flat))
    for signs in ones:
        signs.end()
    assert not ranks.is_open
    assert "rank 2 has not come" in ones[2].errors()[0]


def test_an_error_is_left_for_the_others() -> None:
    store = dist.HashStore()
    one, other = (Signs(store, rank, 2, QUICK) for rank in range(2))
    one.note_error("KeyError: 'no such example'")
    assert other.errors() == ["rank 0 raised KeyError: 'no such example'"]


def test_an_error_is_told_to_who_waits_though_connections_stay_open() -> None:
    store, aborted = dist.HashStore(), threading.Event()
    patient = todist.Liveness(interval=0.02, patience=60)
    one, other = (Signs(store, rank, 2, patient) for rank in range(2))
    other.watch(aborted.set)
    one.note_error("KeyError: 'no such example'")
    try:
        assert waited_for(aborted.is_set)
        with pytest.raises(RuntimeError, match="rank 0 raised KeyError: 'no such example'"):
            other.check()
    finally:
        other.end()


PROGRAM = """
import torch
import torchopt_dist as todist

@todist.auto_init_rpc(process_group="gloo")
def main():
    w = torch.ones(2, requires_grad=True)
    loop = todist.inner_loop(lambda w: (w * w).sum(), todist.sgd(lr=0.1), w, 2, parallel=todist.DataParallel())
    loop.params.sum().backward()

main()
"""


def test_a_program_with_loops_on_ranks_ends_well(tmp_path: Path) -> None:
    """Python aborted at its end, where the thread of the signs of life let go of the group."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    place = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    both = {**os.environ, **place, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    finish(
        *(
            start_python(program, warm=False, env={**both, "RANK": rank, "LOCAL_RANK": rank})
            for rank in ("0", "1")
        )
    )


def test_inside_vmap_ranks_compare_the_values_of_all_samples() -> None:
    found: list[list[float]] = []
    texts: list[str] = []

    def compare(x: torch.Tensor) -> torch.Tensor:
        found.append(_agreement._sums([x, torch.arange(3)]))
        texts.append(_agreement.description_of(x))
        return x

    torch.vmap(compare)(torch.tensor([3.0, 4.0]))
    torch.func.grad(compare)(torch.tensor(2.0))
    assert found[0] == [7.0, 5.0, 3.0, 5.0**0.5]
    assert texts == ["float32[](3, 4)", "float32[]"]
