"""``barrier``: all workers wait for each other, or some do."""

from __future__ import annotations

import pytest

import torchopt_dist as todist
from tests.waits import say, watch


def test_a_barrier_waits_for_all(world, tmp_path):
    def main():
        if todist.get_rank() == 1:
            assert not watch(tmp_path / "through0", 0.2)
            assert not (tmp_path / "through2").exists()
        todist.barrier()
        say(tmp_path / f"through{todist.get_rank()}")

    world(3).run(main)


def test_a_barrier_of_some_waits_for_these_only(world, tmp_path):
    def main():
        if todist.get_rank() == 2:
            assert watch(tmp_path / "through")  # they do not wait for this one
        else:
            for _ in range(3):
                todist.barrier(["worker1", "worker0"])
            todist.barrier([1, 0, 0])
            say(tmp_path / "through")
        todist.barrier()
        return True

    assert world(3).run(main) == [True] * 3


def test_barriers_of_different_ranks_do_not_mix(world):
    def main():
        rank = todist.get_rank()
        for _ in range(10):
            if rank in (0, 1):
                todist.barrier([0, 1])
            if rank in (1, 2):
                todist.barrier([1, 2])
            todist.barrier()
        todist.barrier([rank])  # alone: at once
        return rank

    assert world(3).run(main) == [0, 1, 2]


def test_a_wrong_barrier_is_told(world):
    def main():
        with pytest.raises(TypeError, match=r"one string: write \['worker0'\]"):
            todist.barrier("worker0")
        with pytest.raises(ValueError, match="no worker is named 'worker9'"):
            todist.barrier(["worker0", "worker9"])
        with pytest.raises(ValueError, match=r"must be in \[0, 2\), got 2"):
            todist.barrier([0, 2])
        with pytest.raises(ValueError, match="must contain the calling worker 'worker0'"):
            todist.barrier(["worker1"])
        with pytest.raises(ValueError, match="must contain the calling worker 'worker0'"):
            todist.barrier([])
        with pytest.raises(TypeError, match="name or its rank"):
            todist.barrier([0, 1.0])
        with pytest.raises(TypeError, match=r"must hold names, got None in \('worker0', None\)"):
            todist.barrier(["worker0", None])
        return True

    assert world(2).on_zero(main)
