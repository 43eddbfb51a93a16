"""One inner loop on several ranks gives what it gives on one."""

from __future__ import annotations

import multiprocessing
import re
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import torchopt_dist as todist
from tests.diff import data_parallel_cases as cases
from tests.diff import data_parallel_faults as faults
from tests.diff import data_parallel_memory as memory


@cache
def alone() -> dict[str, Any]:
    return cases.answers(0, 1)


def close(one: Any, other: Any) -> None:
    """Numbers are the same up to rounding; no gradient is the same as one of zeros."""
    one, other = (None if x is None else torch.tensor(x, dtype=torch.float64) for x in (one, other))
    if one is None or other is None:
        assert not (other if one is None else one).count_nonzero()
        return
    torch.testing.assert_close(other, one, rtol=1e-10, atol=1e-12)


def compare(name: str, of_ranks: list[Any]) -> None:
    """What a case gives on ranks with what it gives in one process."""
    size = len(of_ranks)
    own, *rest = alone()[name]
    if own is not None:
        joined = [of_ranks[place % size][0][place // size] for place in range(len(own))]
        close(own, joined)
    for _, *others in of_ranks:
        for one, other in zip(rest, others, strict=True):
            if one is not None or other is not None:
                close(one, other)
        assert others == of_ranks[0][1:]  # the same bits on all ranks


@pytest.mark.parametrize(
    ("workers", "names"),
    [
        pytest.param(2, cases.BY_DAY, id="2"),
        pytest.param(3, cases.BY_DAY, id="3"),
        *(
            pytest.param(workers, cases.NAMES, id=f"{workers}, whole", marks=pytest.mark.nightly)
            for workers in (2, 3, 4)
        ),
    ],
)
def test_ranks_give_what_one_gives(workers: int, names: dict[int, list[str]]) -> None:
    made = todist.launch(cases.on_rank, (names,), nproc_per_host=workers, backend="gloo")
    failures = []
    for size in (1, 2) if workers == 2 else (workers,):
        for name in names[size]:
            try:
                compare(name, [made.rank(rank)[size][name] for rank in range(size)])
            except AssertionError as error:
                error.add_note(f"of {name!r} on {size} rank(s)")
                failures.append(error)
    if failures:
        raise ExceptionGroup("cases differ", failures)


def test_evolution_strategies_of_ranks() -> None:
    made = todist.launch(cases.evolution_on_rank, nproc_per_host=2, backend="gloo")
    one = cases.evolution(0, 1)
    for rank in range(2):
        torch.testing.assert_close(
            torch.tensor(made.rank(rank)["own"]), torch.full((2,), 0.375), rtol=0.3, atol=0
        )
        for name in ("same", "persistent"):  # the losses, and what is estimated with noise of all ranks
            assert made.rank(rank)[name][1:] == made.rank(1 - rank)[name][1:]
            close(one[name][-1], made.rank(rank)[name][-1])


MESSAGES = {
    **{f"other {what}": "the optimizers differ: " for what in faults.others(0)},
    "other state": "the first state of the optimizers must be the same on all ranks",
    **{f"parts {what}": "each rank would have a part of them; got " for what in faults.WHOLE},
    "steps": "the numbers of steps differ: 2 on rank 0, 3 on rank 1",
    "settings": "the adjoints differ: Replayed(snapshots=1, sharded=False, check=False, keep=False) on rank 0, Re",
    "one alone": "no such example",
    "shapes": "the shapes of parameters differ",
    "values": "the parameters must be the same on all ranks with `parallel`, got others on rank 1",
    "values of samples": "the parameters must be the same on all ranks with `parallel`, got others on rank 1",
    "meta": "the replicated meta tensors must be the same on all ranks with `parallel`",
    "not in meta": "`own` of DataParallel must be of tensors that `meta` lists",
    "in the optimizer": "`own` of DataParallel must not have tensors that the optimizer uses",
    "parts of a norm": "`shard` of DataParallel must be None with an optimizer that combines the elements",
    "diagnosed parts": "`diagnose` must be False with `shard` of DataParallel",
    "parts of products": "an adjoint that takes products of all parameters, got todist.SAMA",
    "parts by block": "`shard` of DataParallel must be 'parameters' with `blocks` of todist.Replayed, and 'state'",
    "parameters without blocks": "`shard` of DataParallel must be 'parameters' with `blocks` of todist.Replayed",
    "outside of its block": "`loss` must use the parameters of `blocks` by calling these with `shard='parameters'`",
    "shard": "`shard` must be 'state', 'parameters' or None, got 'all'",
    "compiled": "`compile` must be False with `parallel`",
    "group": "TypeError: `group` must be a process group, a DeviceMesh or None, got str",
    "type": "TypeError: `parallel` must be a todist.DataParallel, got str",
    "wrapped": "TypeError: `params` must not be under DistributedDataParallel",
}


def test_ranks_that_disagree_are_told_so() -> None:
    made = todist.launch(faults.messages, nproc_per_host=2, backend="gloo")
    for rank in range(2):
        assert made.rank(rank).keys() == MESSAGES.keys()
        for name, text in MESSAGES.items():
            assert text in made.rank(rank)[name]
    assert "CollectiveError: a message among the 2 ranks" in made.rank(0)["one alone"]
    assert "rank 1 raised KeyError" in made.rank(0)["one alone"]


def test_what_one_rank_does_alone() -> None:
    made = todist.launch(faults.alone_in_something, nproc_per_host=2, backend="gloo")
    one, other = made.rank(0), made.rank(1)
    assert len(one["losses"]) == 2  # one rank's `stop` ends the loop of all
    assert one["losses"] == other["losses"]
    for found in (one, other):
        close(found["both parts"], found["no forward mode"])
        close([4 * 0.02 / 4 * (1 + 0.98 + 0.98**2 + 0.98**3)] * 2, found["after"])
    assert one["error"].startswith("CollectiveError")
    assert "rank 1 raised KeyError: 'in the backward pass'" in one["error"]
    assert other["error"] == "KeyError: 'in the backward pass'"


@pytest.mark.parametrize(
    ("where", "adjoint", "shard"),
    [
        ("loss", todist.Recorded(), "state"),  # where the others wait for the sums of their parts
        ("again", todist.Implicit(not_converged="ignore"), None),
        ("node", todist.Implicit(not_converged="ignore"), None),
        ("node", todist.Recorded(), None),
        ("node", todist.Recorded(), "state"),
        ("node", todist.Truncated(2), None),
    ],
)
def test_a_rank_that_fails_alone_is_told_of_at_once(where: str, adjoint: Any, shard: Any) -> None:
    begun = time.monotonic()
    made = todist.launch(faults.tells_of, (where, adjoint, shard), nproc_per_host=2, backend="gloo")
    told = "an error in its backward pass" if where == "node" else "KeyError: 'in the loss'"
    assert f"rank 1 raised {told}" in made.rank(0)
    assert made.rank(1).startswith("KeyError: ")
    assert time.monotonic() - begun < 60


def test_sums_of_rows_are_each_ranks_own_and_waits_for_them_end() -> None:
    made = todist.launch(faults.scattered_sums, nproc_per_host=2, backend="gloo")
    assert made.rank(0)[:2] == [[1.0, 3.0], [3.0]]
    assert made.rank(1)[:2] == [[5.0, 7.0], [20.0, 20.0]]
    assert made.rank(0)[2].startswith("a collective has taken 0:00:00.1")


def test_meshes_groups_optimizers_and_autocast() -> None:
    made = todist.launch(cases.groups_and_optimizers, nproc_per_host=4, backend="gloo")
    for rank in range(4):
        found = made.rank(rank)
        assert found["task"] == rank // 2
        for name, wanted in (("mesh", "wanted"), ("group", "wanted"), ("optimizer", "optimizer alone")):
            close(found[wanted], found[name])
        assert "must be a DeviceMesh of one dimension, got 2" in found["two dimensions"]
        assert found["autocast"] == made.rank(0)["autocast"]
        torch.testing.assert_close(
            torch.tensor(found["autocast"]), torch.tensor(found["autocast recorded"]), rtol=0.05, atol=1e-4
        )


def test_a_rank_that_is_stopped_is_an_error_within_the_patience() -> None:
    made = todist.launch(faults.is_stopped, nproc_per_host=2, backend="gloo")
    assert "rank 1 has given no sign of life for 1 s" in made.rank(0)
    assert "a message among the 2 ranks" in made.rank(1)


@pytest.mark.parametrize("to", ["the first loop", "the second loop", "backward"])
def test_a_rank_that_never_comes_is_an_error_within_the_time_out_of_the_group(to: str) -> None:
    begun = time.monotonic()
    made = todist.launch(faults.never_comes, (to,), nproc_per_host=2, backend="gloo")
    assert re.search(
        r"rank 1 has not come to .* for 0:00:02, the time-out of the process group", made.rank(0)
    )
    if to == "the first loop":  # which can begin again
        assert "in vain: rank 0 raised CollectiveError: rank 1 has not come" in made.rank(1)
        assert made.rank(0).endswith("; then 0.0")
    assert time.monotonic() - begun < 60


def test_a_rank_whose_program_ends_before_its_first_loop_is_an_error_at_once() -> None:
    begun = time.monotonic()
    made = todist.launch(faults.ends_early, nproc_per_host=2, backend="gloo")
    assert made.rank(0) == "rank 1 has ended without coming to a loop with `parallel`"
    assert time.monotonic() - begun < 60


def test_dropout_differs_by_rank_and_buffers_are_each_ranks_own() -> None:
    made = todist.launch(cases.noisy, nproc_per_host=2, backend="gloo")
    one, other = made.rank(0), made.rank(1)
    assert one["masks"] != other["masks"]
    assert one["recorded mean"] != other["recorded mean"]
    for name in ("recorded", "recorded weight"):
        assert one[name] == other[name]
        close(one[name], one[name.replace("recorded", "replayed")])
    close(one["recorded mean"], one["replayed mean"])


def test_mean_over_and_vary_over_have_every_derivative() -> None:
    made = todist.launch(cases.transposes, nproc_per_host=2, backend="gloo")
    x = torch.tensor([0.5, 2.0], dtype=torch.float64)
    for rank in range(2):
        found = made.rank(rank)
        factor = found["factor"]
        cubes = (x**3).sum()
        gradient = 2 * factor**2 * cubes * 3 * x**2
        hessian_of_ones = 2 * factor**2 * (3 * x**2 * (3 * x**2).sum() + cubes * 6 * x)
        close(found["value"], (factor * cubes).pow(2).tolist())
        close(found["first"], gradient.tolist())
        close(found["forward"], gradient.sum().tolist())
        for name in ("second", "mixed"):
            close(found[name], hessian_of_ones.tolist())
        close(found["mapped"], torch.stack([gradient, 32 * gradient]).tolist())


@pytest.mark.nightly
def test_each_rank_keeps_its_part_and_sends_what_the_closed_form_says() -> None:
    made = todist.launch(memory.history_and_peaks, nproc_per_host=4, backend="gloo")
    share, steps = 3 / 4, 16
    closed = {  # a step that is run again has its mean gradient again, and pulls another one back
        "whole": 2 * share * (2 + 1 / steps),
        "sharded": share * (3 + 2 * (2 + 1 / steps)),  # and what it starts from is gathered
        "state": 4 * share,
        "parameters": 8 * share,
    }
    for rank in range(4):
        peaks, found = made.rank(rank)
        for whole, parts in zip(peaks["whole"], peaks["parameters"], strict=True):
            # A part of all, the result or its gradient, and some blocks of which Gloo has not let go.
            assert parts == pytest.approx(whole / 4 + 1, abs=0.8)
        for name, (kept, forward, backward) in found.items():
            assert kept / found["whole"][0] == pytest.approx(1 if name == "whole" else 1 / 4, rel=0.1)
            assert forward == pytest.approx((3 if name == "parameters" else 2) * share, rel=0.04)
            assert backward == pytest.approx(closed[name], rel=0.04)


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_rank_that_dies_is_an_error_within_seconds(when: str) -> None:
    begun = time.monotonic()
    # Whichever is heard of first: the death, or what the other rank says of it.
    with pytest.raises(
        (todist.WorkerFailedError, todist.errors.CollectiveError), match=r"SIGKILL|ranks that run one loop"
    ):
        todist.launch(faults.dies, (when,), nproc_per_host=2, backend="gloo")
    assert time.monotonic() - begun < 60


@pytest.mark.parametrize("when", ["forward", pytest.param("backward", marks=pytest.mark.nightly)])
def test_the_others_name_the_rank_that_died(when: str, tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    answers = spawn.SimpleQueue()
    ranks = [
        spawn.Process(target=faults.is_told_who_died, args=(rank, str(tmp_path / "store"), when, answers))
        for rank in range(3)
    ]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join()
    told = [answers.get() for _ in range(2)]
    assert all("elsewhere: rank 1 has given no sign of life since; " in text for text in told), told


def test_sharded_needs_ranks_and_data_parallel_a_group() -> None:
    w = torch.ones(2, requires_grad=True)
    with pytest.raises(ValueError, match="`sharded` must be False without `parallel`"):
        todist.inner_loop(
            lambda w: (w**2).sum(), todist.sgd(lr=0.1), w, 2, adjoint=todist.Replayed(sharded=True)
        )
    with pytest.raises(TypeError, match="`sharded` must be True or False"):
        todist.Replayed(sharded=2)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="needs a process group"):
        todist.DataParallel()
