"""What a replay keeps, how often it runs steps again for that, and the memory that both take."""

from __future__ import annotations

import functools
import gc

import pytest
import torch

import torchopt_dist as todist
from examples.adjoints import PeakMemory
from tests.diff.adjoint_table import Problem, gradients
from tests.diff.replays import agree, both, fewest_advances
from tests.rows import each_row
from torchopt_dist.diff.adjoints._store import lengths, number_of_bytes

D = torch.float64


@functools.cache
def _advances(units: int, slots: int) -> int:
    """How many units are run again, where segments are divided again and again."""
    if units <= 1:
        return 0
    parts = lengths(units, min(slots, units - 1), again=True)
    of_parts = (_advances(count, min(slots, units - 1) - place) for place, count in enumerate(parts[:-1]))
    return units - 1 + sum(of_parts)


@each_row(("units", "slots"), [(1, 1), (7, 1), (7, 3), (20, 3), (20, 20), (31, 4), (50, 2)])
def test_the_fewest_steps_are_run_again(units, slots):
    parts = lengths(units, slots, again=False)
    assert sum(parts) == units
    assert len(parts) <= slots
    found = units + sum(_advances(count, len(parts) - place) for place, count in enumerate(parts))
    assert found == fewest_advances(units + 1, slots)


@each_row(("steps", "snapshots"), [(1, 1), (7, 1), (7, 3), (20, 20)])
def test_as_many_steps_are_run_as_the_plan_says(steps, snapshots):
    w, calls = (
        torch.ones(1 << 19, dtype=D, requires_grad=True),
        [],
    )  # large, so that no steps are recorded together

    def loss(w):
        calls.append(w)
        return (w**3).sum()

    adjoint = todist.Replayed(snapshots=snapshots)
    result = todist.inner_loop(loss, todist.sgd(lr=0.01), w, steps, adjoint=adjoint)
    torch.autograd.grad(result.params.sum(), w)
    assert len(calls) == steps + fewest_advances(steps + 1, snapshots)


def test_a_gradient_that_was_taken_with_a_graph_outlives_the_snapshots():
    p = torch.randn(3, dtype=D, requires_grad=True)

    def loop(adjoint):
        return todist.inner_loop(
            lambda p: (p**4).sum(), todist.adam(lr=0.1, eps=1e-2), p, 4, adjoint=adjoint
        ).params.sum()

    outer, recorded = loop(todist.Replayed(snapshots=1)), loop(todist.Recorded())
    first, expected = (torch.autograd.grad(x, p, create_graph=True)[0] for x in (outer, recorded))
    torch.autograd.grad(outer, p)  # which uses them up
    agree([torch.autograd.grad(gradient.square().sum(), p) for gradient in (first, expected)])


def test_a_gradient_of_a_gradient_keeps_one_steps_graph(monkeypatch):
    monkeypatch.setattr("torchopt_dist.diff.adjoints._store.SMALL", 0)  # no steps are recorded together
    torch.manual_seed(0)
    x, weight = torch.randn(300, 4, dtype=D), torch.tensor(0.5, dtype=D, requires_grad=True)
    p = torch.randn(4, 4, dtype=D, requires_grad=True)

    def peak(adjoint, steps):
        with PeakMemory() as memory:
            params = todist.inner_loop(
                lambda p: (weight * torch.tanh(x @ p)).square().mean(), todist.adam(lr=0.01), p, steps,
                meta=weight, adjoint=adjoint,
            ).params  # fmt: skip
            (first,) = torch.autograd.grad(params.sum(), weight, create_graph=True)
            torch.autograd.grad(first, p)
        return memory.peak

    adjoint = todist.Replayed(snapshots=2)
    peak(adjoint, 1)
    growth, recorded = ((peak(one, 12) - peak(one, 4)) / 8 for one in (adjoint, todist.Recorded()))
    assert growth < 9 * 16 * 8  # gradients of the parameters and of Adam's state, twice, and a few more
    assert recorded > 10 * growth


def test_tensors_that_depend_on_each_other_count_once():
    a = torch.tensor(0.3, dtype=D, requires_grad=True)
    p = torch.tensor([1.0, 2.0], dtype=D, requires_grad=True)

    def chained(adjoint):
        b = a * p.sum()
        result = todist.inner_loop(
            lambda x: (a * b * x**3).sum(), todist.sgd(lr=a * b * 0.1), p * a, 3, meta=(a, b), adjoint=adjoint
        )
        return torch.autograd.grad((result.params**2).sum() + result.losses.sum(), (a, p))

    agree((chained(todist.Replayed()), chained(todist.Recorded())))
    agree(
        both(
            lambda x: (x**2 * p.detach() + x * p**2).sum(),
            p,
            3,
            ins=[p],
            meta=p,
            optimizer=todist.sgd(lr=0.1),
        )
    )


def test_memory_of_four_hundred_steps_is_that_of_a_hundred_in_a_fixed_budget(monkeypatch):
    monkeypatch.setattr("torchopt_dist.diff.adjoints._store.SMALL", 0)
    p = torch.randn(2000, dtype=D, requires_grad=True)

    def peak(steps):
        with PeakMemory() as memory:
            adapted = todist.inner_loop(
                lambda p: (p**4).sum(),
                todist.sgd(lr=0.001),
                p,
                steps,
                adjoint=todist.Replayed(memory=64 * 16_000),
            )
            torch.autograd.grad(adapted.params.sum(), p)
        return memory.peak

    peak(2)
    hundred = peak(100)
    assert 64 * 16_000 < hundred < 1.5 * 64 * 16_000
    assert peak(400) < 1.1 * hundred


@pytest.mark.parametrize("store", ["cpu", "folder"])
def test_snapshots_may_be_kept_elsewhere(store, tmp_path, monkeypatch):
    monkeypatch.setattr("torchopt_dist.diff.adjoints._store.SMALL", 0)
    where = store if store == "cpu" else tmp_path / "snapshots"
    problem = Problem("module", "adam")
    result = problem.run(todist.Replayed(snapshots=3, store=where))
    if store == "folder":
        assert len(list(where.iterdir())) == 3
    expected = gradients(problem.outer(problem.run(todist.Recorded()).params), problem.tensors())
    found = gradients(problem.outer(result.params), problem.tensors())
    for what, gradient in expected.items():
        torch.testing.assert_close(found[what], gradient, rtol=1e-10, atol=1e-10)
    if store == "folder":
        gc.collect()
        assert list(where.iterdir()) == []


def test_a_budget_below_one_snapshot_says_what_it_takes():
    p = torch.ones(100, dtype=D, requires_grad=True)
    with pytest.raises(ValueError, match="one snapshot, which takes 1,600 bytes, got 1000"):
        todist.inner_loop(
            lambda p: p.sum(), todist.sgd(lr=0.1, momentum=0.9), p, 2, adjoint=todist.Replayed(memory=1000)
        )
    assert number_of_bytes("2GiB") == 2**31
    assert number_of_bytes("1.5 kB") == 1500


def test_a_folder_without_room_and_one_that_is_emptied_are_told(tmp_path, monkeypatch):
    p = torch.ones(100, requires_grad=True)

    def adapted() -> torch.Tensor:
        return todist.inner_loop(
            lambda p: (p**2).sum(), todist.sgd(lr=0.1), p, 3, adjoint=todist.Replayed(store=tmp_path)
        ).params

    made = adapted()
    for file in tmp_path.iterdir():
        file.unlink()
    with pytest.raises(FileNotFoundError, match=r"`store` must be left alone until the gradient .* is gone"):
        torch.autograd.grad(made.sum(), p)

    def full(*_: object) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 832 vs 726")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match=r"with room for the snapshots: one of \d+ bytes .* bytes are free"):
        adapted()
