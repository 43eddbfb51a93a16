"""What a replay keeps, how often it runs steps again for that, and the memory that both take."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import torchopt_dist as todist
from examples.adjoints import PeakMemory
from tests.diff.adjoint_table import Problem, gradients
from tests.diff.replays import agree, both, fewest_advances
from torchopt_dist.diff.adjoints import replayed
from torchopt_dist.diff.replay._plan import places, steps_run_again
from torchopt_dist.diff.replay._snapshots import Store, number_of_bytes

D = torch.float64


@pytest.mark.parametrize(("steps", "snapshots"), [(1, 1), (7, 1), (7, 3), (20, 3), (20, 20), (31, 4)])
def test_as_many_steps_are_run_again_as_the_bound_says(steps, snapshots, monkeypatch):
    held, counts = [], []

    class Watched(Store):
        def keep(self, value):
            token = Token()
            held.append(weakref.ref(token))
            counts.append(sum(ref() is not None for ref in held))
            give = super().keep(value)
            return lambda token=token: give()

    class Token:
        pass

    monkeypatch.setattr(replayed, "Store", Watched)
    w = torch.tensor(1.0, dtype=D, requires_grad=True)
    calls = []

    def loss(w):
        calls.append(w)
        return w**3

    result = todist.inner_loop(
        loss, todist.sgd(lr=0.01), w, steps, adjoint=todist.Replayed(snapshots=snapshots)
    )
    found = torch.autograd.grad(result.params, w)[0]
    # For a gradient and its derivative the loss is called once.
    assert len(calls) == 2 * steps + steps_run_again(steps, snapshots)
    assert max(counts) == len(places(steps, snapshots)) <= snapshots
    recorded = todist.inner_loop(lambda w: w**3, todist.sgd(lr=0.01), w, steps).params
    torch.testing.assert_close(found, torch.autograd.grad(recorded, w)[0], rtol=1e-12, atol=0)


def test_with_room_for_all_steps_gradients_are_kept_and_no_step_is_run_again(monkeypatch):
    kept, calls = [], []

    class Watched(Store):
        def keep(self, value):
            kept.append(type(value).__name__)
            return super().keep(value)

    monkeypatch.setattr(replayed, "Store", Watched)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Tanh()).double()
    xs = [torch.randn(5, 3, dtype=D) for _ in range(10)]
    lr = torch.tensor(0.05, dtype=D, requires_grad=True)

    def loss(net, x):
        calls.append(torch.is_grad_enabled())
        return (net(x) ** 2).mean()

    made = []
    for adjoint in (todist.Replayed(), todist.Recorded()):
        calls.clear()
        result = todist.inner_loop(loss, todist.adam(lr=lr, eps=1e-3), net, xs, adjoint=adjoint)
        outer = sum((leaf**3).sum() for leaf in result.params.parameters())
        ins = [lr, *net.parameters()]
        if not made:  # once more, from the same snapshots
            again = torch.autograd.grad(outer, ins, retain_graph=True)
            assert len(calls) == 20
        made.append(torch.autograd.grad(outer, ins))
    agree(made)
    assert all(map(torch.equal, made[0], again))
    first = [kind for n in range(10) for kind in (["Carry"] if n % 4 == 0 else []) + ["Gradient"]]
    assert kept[: len(first)] == first


@pytest.mark.parametrize("budget", [2, 3, 4, 6, 7, 11])
def test_a_budget_is_shared_among_snapshots_and_gradients_for_the_fewest_evaluations(budget):
    steps, calls = 9, []
    p = torch.linspace(0.1, 1, 1000, dtype=D, requires_grad=True)
    lr = torch.tensor(0.1, dtype=D, requires_grad=True)

    def loss(p):
        calls.append(p)
        return (p**4).sum()

    made = []
    for adjoint in (todist.Replayed(memory=budget * 8_000, sweep="forward"), todist.Recorded()):
        calls.clear()
        result = todist.inner_loop(loss, todist.sgd(lr=lr, momentum=0.9), p, steps, adjoint=adjoint)
        outer = (result.params**2).sum() + result.losses.sum()
        if not made:  # once more, from the same snapshots
            again = torch.autograd.grad(outer, [p, lr], retain_graph=True)
            found = len(calls)
        made.append(torch.autograd.grad(outer, [p, lr]))
    agree(made)
    assert all(map(torch.equal, made[0], again))
    # A snapshot takes 2, a gradient 1: of the last step, and of so many first ones.
    evaluations = min(
        fewest_advances(rest + 1, snapshots) - (gradients > 0)
        for snapshots in range(1, budget // 2 + 1)
        for gradients in range(min(budget - 2 * snapshots, 7) + 1)
        for rest in [steps - max(0, gradients - 1)]
    )
    assert found == 2 * steps + evaluations  # of a run, of the sweeps, and of what is evaluated again


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


def test_a_gradient_of_a_gradient_keeps_one_steps_graph():
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


def test_memory_of_four_hundred_steps_is_that_of_a_hundred_in_a_fixed_budget():
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
def test_snapshots_may_be_kept_elsewhere(store, tmp_path):
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
