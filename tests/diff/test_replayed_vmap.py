"""Replayed loops inside of ``vmap`` have the gradients of tasks in a Python loop, in memory flat in the steps."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchopt_dist as todist
from examples.adjoints import PeakMemory
from tests.diff.adjoint_table import Problem
from tests.rows import each_row

D = torch.float64
RECORDED, REPLAYED = todist.Recorded(), todist.Replayed(snapshots=2)


def agree(task: Any, ins: list[Tensor], *batch: Tensor, replayed: Any = REPLAYED) -> tuple[Tensor, ...]:
    """A task replayed in ``vmap`` and recorded in a Python loop; returns its gradients."""
    at_once = torch.vmap(lambda *sample: task(replayed, *sample))(*batch)
    one_by_one = torch.stack([task(RECORDED, *sample) for sample in zip(*batch, strict=True)])
    torch.testing.assert_close(at_once, one_by_one, rtol=1e-10, atol=1e-12)
    return compare(at_once, one_by_one, ins)


def compare(at_once: Tensor, one_by_one: Tensor, ins: list[Tensor]) -> tuple[Tensor, ...]:
    found, expected = (
        torch.autograd.grad(made.square().sum(), ins, allow_unused=True) for made in (at_once, one_by_one)
    )
    for one, other in zip(found, expected, strict=True):
        if one is None or other is None:
            assert one is None or not one.any()
            assert other is None or not other.any()
        else:
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    return found


@each_row("optimizer", ["momentum", "adam", "adam of numbers", "clipped adam", "schedule"])
def test_first_parameters_meta_tensors_rates_and_batches_that_are_mapped_over(optimizer):
    problem = Problem("module", optimizer)
    xs = torch.stack(problem.xs).detach().requires_grad_()
    ys = torch.randn(4, 5, 1, dtype=D)

    def task(adjoint, x, y):
        def loss(net):
            return (problem.weights * (net(x) - y).squeeze(1) ** 2).mean()

        made = todist.inner_loop(
            loss, problem.optimizer, problem.net, 3, meta=(problem.weights, x), adjoint=adjoint
        )
        return (made.params(x) - y).square().mean() + (made.losses * torch.arange(1, 4)).sum()

    ins = [*problem.net.parameters(), problem.weights, problem.lr, xs]
    for adjoint in (REPLAYED, todist.Replayed(), RECORDED, todist.Truncated(3)):
        agree(task, ins, xs, ys, replayed=adjoint)


def test_samples_with_rates_parameters_and_states_of_their_own_that_stop_by_number():
    torch.manual_seed(0)
    lrs = torch.tensor([0.1, 0.2, 0.05], dtype=D, requires_grad=True)
    firsts = torch.randn(3, 2, dtype=D, requires_grad=True)
    scale = torch.tensor(0.7, dtype=D, requires_grad=True)
    xs = torch.randn(3, 4, 2, dtype=D, requires_grad=True)

    def task(adjoint, lr, first, x):
        params = {
            "moved": first * scale,
            "frozen": torch.tensor([2.0, 3.0], dtype=D),
            "own": x[0].detach() > 0,
        }
        made = todist.inner_loop(
            lambda p, x: ((p["moved"] * p["frozen"] * p["own"] * x).sum() ** 4 * scale, {"x": x.detach(), "n": 3}),
            todist.adam(lr=lr, eps=1e-2), params, x, meta=scale, adjoint=adjoint, has_aux=True,
            stop=lambda number, loss: number == 2 and loss.dim() == 0,
        )  # fmt: skip
        assert len(made.losses) == 3
        assert [aux["n"] for aux in made.aux] == [3, 3, 3]
        momentum = todist.pytree.flatten(made.state)[0][0]
        return made.params["moved"].sum() + made.losses.sum() + made.aux[1]["x"].sum() + momentum.sum()

    found = agree(task, [lrs, firsts, scale, xs], lrs, firsts, xs)
    assert all(gradient.any() for gradient in found)


def test_a_vmap_in_a_vmap_over_other_dimensions():
    p = torch.randn(2, dtype=D, requires_grad=True)
    xs = torch.randn(2, 4, 3, dtype=D, requires_grad=True)
    weights = torch.rand(4, dtype=D, requires_grad=True)

    def task(adjoint, x, weight):
        made = todist.inner_loop(
            lambda w: weight * ((w - x) ** 4).sum(),
            todist.chain(todist.transform.clip_grad_norm(0.5), todist.adam(lr=0.1)),
            p, 3, meta=(x, weight), adjoint=adjoint,
        )  # fmt: skip
        return made.params.prod()

    def replayed(x, weight):
        return task(REPLAYED, x, weight)

    at_once = torch.vmap(torch.vmap(replayed, in_dims=(1, None)), in_dims=(1, 0), out_dims=1)(xs, weights)
    rows = [[task(RECORDED, xs[:, i, j], weights[i]) for i in range(4)] for j in range(3)]
    one_by_one = torch.stack([torch.stack(row) for row in rows])
    torch.testing.assert_close(at_once, one_by_one)
    compare(at_once, one_by_one, [p, xs, weights])


def test_batch_norm_and_tied_parameters():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 3)).double()
    net[3].weight = net[0].weight
    xs = torch.randn(3, 6, 3, dtype=D)

    def task(adjoint, x):
        made = todist.inner_loop(
            lambda net: F.mse_loss(net(x), x.flip(0)), todist.adam(lr=0.05, eps=1e-3), net, 3, adjoint=adjoint
        ).params
        made.eval()
        return made(x).square().sum() + made[1].running_var.sum()

    agree(task, list(net.parameters()), xs)


@each_row("randomness", ["different", "same"])
def test_a_step_that_is_run_again_draws_the_same_numbers(randomness):
    p = torch.randn(5, dtype=D, requires_grad=True)
    xs = torch.randn(3, 5, dtype=D)

    def gradient(adjoint):
        def task(x):
            return todist.inner_loop(
                lambda p: F.dropout((p - x) ** 4).sum(), todist.sgd(lr=0.01), p, 5, adjoint=adjoint, seed=1
            ).params.sum()

        return torch.autograd.grad(torch.vmap(task, randomness=randomness)(xs).sum(), p)[0]

    torch.testing.assert_close(gradient(todist.Replayed(snapshots=1)), gradient(RECORDED))


def test_recorded_loops_need_no_declaration_and_have_every_transform_that_they_had():
    hidden, x = torch.tensor(0.7, dtype=D, requires_grad=True), torch.randn(3, 4, dtype=D)

    def total(scale):
        def task(x):
            return todist.inner_loop(
                lambda p: (hidden * scale * (p - x) ** 4).sum(), todist.adam(lr=0.1, eps=1e-2), x.flip(0), 3
            ).params.square().sum()  # fmt: skip

        return torch.vmap(task)(x).sum()

    one = torch.ones((), dtype=D, requires_grad=True)
    (slope,) = torch.autograd.grad(total(one), one, create_graph=True)
    (curve,) = torch.autograd.grad(slope, one)
    (of_hidden,) = torch.autograd.grad(total(one), hidden)
    torch.testing.assert_close(of_hidden * hidden, slope)  # the loss knows only their product
    func = torch.func
    for found in (func.grad(total)(one), func.jacrev(total)(one), func.jacfwd(total)(one)):
        torch.testing.assert_close(found, slope)
    torch.testing.assert_close(func.hessian(total)(one), curve)
    step = 1e-5
    torch.testing.assert_close(slope, (total(1 + step) - total(1 - step)) / (2 * step), rtol=1e-6, atol=1e-8)


class _Cube(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x**3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        return grad * 3 * ctx.saved_tensors[0] ** 2


def test_a_loop_in_the_loss_and_gradients_of_gradients():
    x = torch.randn(3, 2, dtype=D, requires_grad=True)
    weight = torch.tensor(0.7, dtype=D, requires_grad=True)

    def task(adjoint, x):
        def inner(lr):
            return todist.inner_loop(
                lambda p: (p**4).sum() + weight * p.sum(), todist.sgd(lr=lr), x, 2, meta=weight, adjoint=adjoint
            ).params  # fmt: skip

        return todist.inner_loop(
            lambda lr: inner(lr).square().sum(), todist.sgd(lr=0.01), torch.tensor(0.1, dtype=D, requires_grad=True),
            2, meta=(x, weight), adjoint=adjoint,
        ).params  # fmt: skip

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a loop in the loss has no forward mode
        agree(task, [x, weight], x)

    def second(made):
        first = torch.autograd.grad(made.square().sum(), [x, weight], create_graph=True)
        return torch.stack([g.square().sum() for g in first])

    at_once = torch.vmap(lambda x: simple(REPLAYED, x, weight))(x)
    compare(second(at_once), second(torch.stack([simple(RECORDED, row, weight) for row in x])), [x, weight])


def simple(adjoint: Any, x: Tensor, weight: Tensor) -> Tensor:
    made = todist.inner_loop(
        lambda p: ((p - x) ** 4).sum() + weight * (p**3).sum(), todist.adam(lr=0.1, eps=1e-2), x, 3,
        meta=(x, weight), adjoint=adjoint,
    )  # fmt: skip
    return made.params.square().sum()


def test_memory_is_flat_in_the_steps(monkeypatch):
    monkeypatch.setattr("torchopt_dist.diff.adjoints._store.SMALL", 0)  # no steps are recorded together
    p = torch.randn(50, dtype=D, requires_grad=True)
    xs = torch.randn(20, 50, dtype=D)

    def peak(adjoint, steps):
        with PeakMemory() as memory:
            made = torch.vmap(
                lambda x: (
                    todist.inner_loop(
                        lambda p: ((p - x) ** 4).tanh().sum(), todist.adam(lr=0.01), p, steps, adjoint=adjoint
                    ).params
                )
            )(xs)
            torch.autograd.grad(made.sum(), p)
        return memory.peak

    adjoint = todist.Replayed(snapshots=3)
    peak(adjoint, 2)
    assert peak(adjoint, 80) < 1.1 * peak(adjoint, 20)
    assert peak(adjoint, 40) < 0.2 * peak(RECORDED, 40)


def test_what_nobody_declared_is_an_error():
    net, hidden = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), torch.ones(2, requires_grad=True)

    def task(x):
        return todist.inner_loop(
            lambda net: net(x * hidden).sum(), todist.sgd(lr=0.1), net, 2, adjoint=todist.Replayed(blocks="auto")
        ).losses  # fmt: skip

    with pytest.raises(ValueError, match=r"`meta` must list .* it lacks 1, of shape \(2,\)"):
        torch.vmap(task)(torch.ones(3, 2))


def test_inside_of_other_transforms_all_steps_are_recorded_and_that_is_said_once():
    p = torch.randn(3, dtype=D)

    def outer(p):
        return todist.inner_loop(
            lambda w: (w**4).sum(), todist.sgd(lr=0.01), p, 2, adjoint=REPLAYED
        ).params.sum()

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        found, again = (torch.func.grad(outer)(p) for _ in range(2))
    text = "records all steps inside of torch.func's transforms other than vmap"
    assert [text in str(one.message) for one in told] == [True]
    assert torch.equal(found, again)
    p.requires_grad_()
    torch.testing.assert_close(found, torch.autograd.grad(outer(p), p)[0])
