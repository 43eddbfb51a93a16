"""Replayed loops have the gradient of recorded ones, whatever the loss is made of, from few snapshots."""

from __future__ import annotations

import functools
import gc
import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import torchopt_dist as todist
from examples.adjoints import PeakMemory
from tests.diff.adjoint_table import Problem, gradients
from torchopt_dist.diff.adjoints import replayed
from torchopt_dist.diff.replay import _tape
from torchopt_dist.diff.replay._binomial import places, split, steps_run_again
from torchopt_dist.diff.replay._snapshots import Store, number_of_bytes
from torchopt_dist.transform.apply_updates import differentiable_step

D = torch.float64


@functools.cache
def fewest_advances(steps: int, snapshots: int) -> int:
    """By trying all places of the next snapshot; the sweep that comes to the last step counts."""
    if steps <= 1:
        return 0
    if snapshots == 1:
        return steps * (steps - 1) // 2
    return min(
        ahead + fewest_advances(steps - ahead, snapshots - 1) + fewest_advances(ahead, snapshots)
        for ahead in range(1, steps)
    )


@pytest.mark.parametrize("snapshots", [1, 2, 3, 5])
def test_snapshots_are_where_the_fewest_steps_are_run_again(snapshots):
    for steps in range(1, 40):
        assert steps_run_again(steps, snapshots) == fewest_advances(steps + 1, snapshots) - steps
        fewest = fewest_advances(steps, snapshots)
        if steps > 1 and snapshots > 1:
            ahead = split(steps, snapshots)
            assert fewest == ahead + fewest_advances(steps - ahead, snapshots - 1) + fewest_advances(
                ahead, snapshots
            )


@pytest.mark.parametrize(("steps", "snapshots"), [(1, 1), (7, 1), (7, 3), (20, 3), (20, 20), (31, 4)])
def test_as_many_steps_are_run_again_as_the_bound_says(steps, snapshots, monkeypatch):
    tapes, held = [], []

    class Watched(_tape.Tape):
        def __post_init__(self):
            super().__post_init__()
            tapes.append(self)
            keep = self.store.keep

            def counted(snapshot):
                token = Token()
                held.append(weakref.ref(token))
                counts.append(sum(ref() is not None for ref in held))
                give = keep(snapshot)
                return lambda token=token: give()

            self.store.keep = counted

    class Token:
        pass

    counts = []
    monkeypatch.setattr(replayed, "Tape", Watched)
    w = torch.tensor(1.0, dtype=D, requires_grad=True)
    calls = []

    def loss(w):
        calls.append(w)
        return w**3

    result = todist.inner_loop(
        loss, todist.sgd(lr=0.01), w, steps, adjoint=todist.Replayed(snapshots=snapshots)
    )
    found = torch.autograd.grad(result.params, w)[0]
    assert tapes[0].run_again == steps_run_again(steps, snapshots)
    # For a gradient and its derivative the loss is called once.
    assert len(calls) == 2 * steps + tapes[0].run_again
    assert max(counts) == len(places(steps, snapshots)) <= snapshots
    recorded = todist.inner_loop(lambda w: w**3, todist.sgd(lr=0.01), w, steps).params
    torch.testing.assert_close(found, torch.autograd.grad(recorded, w)[0], rtol=1e-12, atol=0)


def both(loss, params, batches, *, ins, optimizer=None, replayed=None, **options):
    """The gradients of a replayed and of a recorded loop."""
    made = []
    for one in (replayed or todist.Replayed(snapshots=2), todist.Recorded()):
        result = todist.inner_loop(
            loss, optimizer or todist.adam(lr=0.05, eps=1e-3), params, batches, adjoint=one, seed=1, **options
        )
        leaves = list(result.params.parameters()) if isinstance(params, nn.Module) else [result.params]
        outer = (
            sum((leaf**3).sum() for leaf in leaves)
            + (result.losses * torch.arange(1, len(result.losses) + 1)).sum()
        )
        made.append(torch.autograd.grad(outer, ins, allow_unused=True))
    return made


def agree(made, atol=1e-10):
    for one, other in zip(*made, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=atol)


def test_dropout_batch_norm_and_tied_and_frozen_parameters():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Tanh(), nn.Linear(3, 3), nn.Linear(3, 1)
    )
    net = net.double()
    net[4].weight = net[0].weight
    net[5].requires_grad_(False)
    weights = torch.rand(6, 1, dtype=D, requires_grad=True)
    xs = [torch.randn(6, 3, dtype=D) for _ in range(4)]

    def loss(net, x):
        return (weights * net(x) ** 2).mean()

    made = both(loss, net, xs, ins=[*(p for p in net.parameters() if p.requires_grad), weights], meta=weights)
    agree(made)
    assert made[0][-1].any()


LABELS = torch.tensor([0, 1, 2, 1])
TARGET = torch.linspace(-1, 1, 12, dtype=D).reshape(4, 3)
LOSSES = {
    "mse_loss": lambda p, q: F.mse_loss(torch.tanh(p) * q, TARGET),
    "mse_loss of sums": lambda p, q: F.mse_loss(p * q, TARGET, reduction="sum", weight=q.detach()),
    "huber_loss": lambda p, q: F.huber_loss(p * q, 3 * TARGET, delta=0.7),
    "smooth_l1_loss": lambda p, q: F.smooth_l1_loss(p * q, TARGET),
    "cross_entropy": lambda p, q: F.cross_entropy(p * q, LABELS, label_smoothing=0.1),
    "binary_cross_entropy": lambda p, q: F.binary_cross_entropy_with_logits(p * q, TARGET.sigmoid()),
    "silu": lambda p, q: (F.silu(p * q) ** 2).sum(),
    "mish": lambda p, q: (F.mish(p * q) ** 2).sum(),
    "gelu": lambda p, q: (F.gelu(p * q) ** 2).sum(),
    "group_norm": lambda p, q: (F.group_norm(p * q, 1, weight=q[0], bias=p[0]) ** 3).sum(),
    "layer_norm": lambda p, q: (F.layer_norm(p * q, (3,), weight=q[0], bias=p[0]) ** 3).sum(),
    "attention": lambda p, q: (F.scaled_dot_product_attention(p[None], q[None], (p * q)[None]) ** 3).sum(),
    "max_pool": lambda p, q: (F.max_pool2d((p * q)[None, None], 2) ** 3).sum(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_operations_go_in_both_modes(name):
    torch.manual_seed(0)
    p = torch.randn(4, 3, dtype=D, requires_grad=True)
    q = torch.rand(4, 3, dtype=D, requires_grad=True)
    for mode in ("forward", "reverse"):
        replayed = todist.Replayed(sweep=mode)
        # a warning is an error
        agree(both(lambda p: LOSSES[name](p, q), p, 3, ins=[p, q], meta=q, replayed=replayed))


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        return grad * 3 * ctx.saved_tensors[0] ** 2


WITHOUT_FORWARD_MODE = {
    "a custom function": (lambda p, q: (_Cube.apply(p) * q).sum(), "custom Function|forward mode AD|jvp"),
    "a node that loses tangents": (
        lambda p, q: torch.linalg.solve(p[:3] + 5 * torch.eye(3, dtype=D), q[:3]).square().sum(),
        "LinalgSolveEx",
    ),
    "a decomposition": (
        lambda p, q: torch.linalg.cholesky(p.T @ p + torch.eye(3, dtype=D)).sum() * q.sum(),
        "LinalgCholeskyEx",
    ),
}


@pytest.mark.parametrize("name", WITHOUT_FORWARD_MODE)
def test_steps_without_forward_mode_are_recorded_by_themselves_and_that_is_said_once(name):
    function, text = WITHOUT_FORWARD_MODE[name]
    torch.manual_seed(0)
    p = torch.randn(4, 3, dtype=D, requires_grad=True)
    q = torch.rand(4, 3, dtype=D, requires_grad=True)
    with pytest.warns(UserWarning, match=text) as told:
        made = both(
            lambda p: function(p, q), p, 3, ins=[p, q], meta=q, replayed=todist.Replayed(sweep="forward")
        )
    agree(made)
    assert len(told) == 1
    agree(both(lambda p: function(p, q), p, 3, ins=[p, q], meta=q))  # small: in reverse mode, nothing is said


@pytest.mark.parametrize(("count", "parameters", "modes"), [(2000, 3, "RRR"), (2**21 + 1, 3, "FFF")])
def test_a_large_graph_of_a_loss_is_not_differentiated_with_a_graph(count, parameters, modes):
    p = torch.ones(parameters, dtype=D, requires_grad=True)
    found = []

    def loss(p):
        duals = forward_ad.unpack_dual(p).tangent is not None if torch.is_grad_enabled() else None
        found.append("F" if duals else "R")
        return (p[0] * torch.ones(count, dtype=D)).sum() * (p**2).sum()

    result = todist.inner_loop(loss, todist.sgd(lr=0.01), p, 3, adjoint=todist.Replayed())
    found.clear()
    result.params.sum().backward()
    assert "".join(found) == modes


def test_with_room_for_all_steps_gradients_are_kept_and_no_step_is_run_again(monkeypatch):
    kept, calls = [], []

    class Watched(Store):
        def keep(self, snapshot):
            kept.append((snapshot.is_whole, snapshot.grads is not None))
            return super().keep(snapshot)

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
    assert kept == [(number % 4 == 0, True) for number in range(10)]


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


def test_loops_in_two_threads_draw_from_generators_of_their_own():
    meeting = threading.Barrier(2)
    x = torch.linspace(-1, 1, 12, dtype=D).reshape(4, 3)

    def gradient(seed, meet):
        w = torch.linspace(0.1, 1, 9, dtype=D).reshape(3, 3).requires_grad_()

        def loss(w):
            kept = torch.rand(4, 3, generator=torch.Generator().manual_seed(seed)) < 0.5
            if meet:  # at each call: both loops are at the same place of the same step
                meeting.wait(60)
            return (F.layer_norm(x @ w, (3,)) * kept - w.sum()).square().mean() / 9

        adjoint = todist.Replayed(snapshots=1, sweep="reverse")
        adapted = todist.inner_loop(loss, todist.sgd(lr=0.1), w, 3, adjoint=adjoint)
        return torch.autograd.grad(adapted.params.square().sum(), w)[0]

    expected = [gradient(seed, False) for seed in (1, 2)]
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda seed: gradient(seed, True), (1, 2)))
    assert not torch.allclose(*expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_gradients_of_gradients_are_those_of_recording():
    problem = Problem("tree", "adam")
    tensors = problem.tensors()

    def second(adjoint):
        result = problem.run(adjoint, seed=0)
        leaves = [tensors["meta tensor"], tensors["hyper-parameter"]]
        first = torch.autograd.grad(problem.outer(result.params), leaves, create_graph=True)
        return gradients(sum((g**2).sum() for g in first), tensors)

    expected = second(todist.Recorded())
    for adjoint in (todist.Replayed(sweep="forward"), todist.Replayed(snapshots=1)):
        found = second(adjoint)
        for what, gradient in expected.items():
            torch.testing.assert_close(found[what], gradient, rtol=1e-9, atol=1e-9)
    assert found["first 0.weight"].any()


def test_derivatives_of_every_order_where_tensors_depend_on_each_other():
    a = torch.tensor(0.3, dtype=D, requires_grad=True)
    p = torch.tensor([1.0, -0.5], dtype=D, requires_grad=True)
    lr = torch.tensor(0.1, dtype=D, requires_grad=True)

    def derivatives(adjoint, a, p, lr):
        b = a * p.sum()
        result = todist.inner_loop(
            lambda x: (a * b * x**4).sum() + F.dropout((x * p) ** 3).sum(), todist.adam(lr=lr, eps=1e-2), p * a, 3,
            meta=(a, b, p), adjoint=adjoint, seed=1,
        )  # fmt: skip
        outer = (result.params**3).sum() + (result.losses**2).sum()
        for _ in range(3):
            found = torch.autograd.grad(outer, (a, p, lr), create_graph=True)
            outer = sum(gradient.square().sum() for gradient in found)
            yield found

    replayed, recorded = (
        list(derivatives(x, a, p, lr)) for x in (todist.Replayed(snapshots=2), todist.Recorded())
    )
    for one, other in zip(replayed, recorded, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)
    outer = functools.partial(lambda *ins: next(derivatives(todist.Replayed(), *ins)))
    assert torch.autograd.gradcheck(outer, (a, p, lr), eps=1e-5)


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


def test_a_retained_graph_can_be_gone_back_through_again():
    p = torch.randn(3, dtype=D, requires_grad=True)
    result = todist.inner_loop(
        lambda p: (p**4).sum(), todist.sgd(lr=0.01), p, 9, adjoint=todist.Replayed(snapshots=2)
    )
    rows = [torch.autograd.grad(entry, p, retain_graph=True)[0] for entry in result.params]
    expected = todist.inner_loop(lambda p: (p**4).sum(), todist.sgd(lr=0.01), p, 9).params
    assert torch.equal(torch.autograd.grad(result.params.sum(), p)[0], sum(rows))
    torch.testing.assert_close(sum(rows), torch.autograd.grad(expected.sum(), p)[0])
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(result.params.sum(), p)


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


def test_memory_of_a_thousand_steps_is_that_of_a_hundred_in_a_fixed_budget():
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
    assert peak(1000) < 1.1 * hundred


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


def test_what_happens_to_the_module_before_backward_has_no_part_in_it():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Linear(3, 1)).double()
    x = torch.randn(6, 3, dtype=D)

    def run(adjoint):
        result = todist.inner_loop(
            lambda net: net(x).square().mean(), todist.sgd(lr=0.1), net, 3, adjoint=adjoint, seed=0
        )
        net.eval()
        result.params.eval()
        found = torch.autograd.grad(result.params(x).sum(), list(net.parameters()))
        net.train()
        return found

    agree((run(todist.Replayed()), run(todist.Recorded())))


def test_a_loop_in_the_loss_of_a_loop_in_the_loss_of_a_loop():
    """Three levels: initial parameters, a learning rate learned inside, and a weight of that learning."""
    weight = torch.tensor(0.7, dtype=D, requires_grad=True)
    x = torch.tensor([1.0, -0.5], dtype=D, requires_grad=True)

    def loop(adjoint):
        def innermost(log_lr, scale):
            return todist.inner_loop(
                lambda p: (p**4).sum() + scale * p.sum(), todist.sgd(lr=log_lr.exp()), x, 2,
                meta=(log_lr, scale), adjoint=adjoint,
            ).params  # fmt: skip

        def middle(scale):
            first = torch.tensor(-3.0, dtype=D, requires_grad=True)
            return todist.inner_loop(
                lambda log_lr: innermost(log_lr, scale).square().sum(), todist.adam(lr=0.1, eps=1e-3), first, 2,
                meta=(x, scale), adjoint=adjoint,
            ).params  # fmt: skip

        scale = todist.inner_loop(
            lambda s: (middle(s) - weight * s) ** 2, todist.sgd(lr=0.1), torch.ones((), dtype=D, requires_grad=True), 2,
            meta=(x, weight), adjoint=adjoint,
        ).params  # fmt: skip
        return torch.autograd.grad(scale, (weight, x))

    expected = loop(todist.Recorded())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a loop in the loss has no forward mode
        found = loop(todist.Replayed())
    agree((found, expected))
    assert all(g.any() for g in found)


def test_autocast_of_the_caller_holds_in_backward():
    net = nn.Linear(8, 8)
    x = torch.randn(4, 8)
    seen = []

    def loss(net, _):
        out = net(x)
        seen.append(out.dtype)
        return out.float().square().mean()

    with torch.autocast("cpu", torch.bfloat16):
        result = todist.inner_loop(
            loss, todist.sgd(lr=0.1), net, [0, 0], adjoint=todist.Replayed(snapshots=1)
        )
    torch.autograd.grad(result.params.weight.sum(), net.weight)
    assert len(seen) > 4
    assert set(seen) == {torch.bfloat16}


def test_a_tensor_that_nobody_declared_is_named_by_its_shape():
    p = torch.ones(3, dtype=D, requires_grad=True)
    hidden = torch.ones(3, dtype=D, requires_grad=True)
    seen = torch.ones(3, dtype=D, requires_grad=True)

    def late(p, number):
        return (p * seen * (hidden if number == 2 else 1.0)).sum()

    with pytest.raises(ValueError, match=r"`meta` must list .* lacks 1, of shape \(3,\)"):
        todist.inner_loop(late, todist.sgd(lr=0.1), p, [0, 1, 2], meta=seen, adjoint=todist.Replayed())
    todist.inner_loop(late, todist.sgd(lr=0.1), p, [0, 1], meta=seen, adjoint=todist.Replayed())
    todist.inner_loop(late, todist.sgd(lr=0.1), p, [0, 2], meta=(seen, hidden), adjoint=todist.Replayed())


HIDDEN = torch.tensor(0.1, dtype=D, requires_grad=True)


def _scaled_by_what_is_hidden(updates, state, *, params=None, inplace=True):
    return -HIDDEN * updates, state


def test_a_hyper_parameter_that_is_not_found_is_named_by_its_shape():
    p = torch.ones(3, dtype=D, requires_grad=True)
    optimizer = todist.GradientTransformation(todist.identity().init, _scaled_by_what_is_hidden)

    def gradient(of, **options):
        result = todist.inner_loop(
            lambda p: (p**2).sum(), optimizer, p, 2, adjoint=todist.Replayed(), **options
        )
        return torch.autograd.grad(result.params.sum(), of)[0]

    with pytest.raises(ValueError, match=r"`meta` must list .* it lacks 1, of shape \(\)"):
        gradient(p)
    torch.testing.assert_close(gradient(HIDDEN, meta=HIDDEN).item(), 3 * -4 * 0.8)


def test_check_finds_a_loss_that_differs():
    p = torch.ones(3, dtype=D, requires_grad=True)
    calls = []

    def changing(p):
        calls.append(1)
        return (p * len(calls)).sum()

    with pytest.raises(ValueError, match=r"`loss` must give the same .* differs by 3"):
        todist.inner_loop(changing, todist.sgd(lr=0.1), p, 2, adjoint=todist.Replayed(check=True))
    todist.inner_loop(
        lambda p: F.dropout(p).sum(), todist.sgd(lr=0.1), p, 2, adjoint=todist.Replayed(check=True)
    )


class _Averaging(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("mean", torch.zeros(2))

    def forward(self):
        self.mean = 0.5 * self.mean + self.weight
        return self.mean.sum()


def test_buffers_that_depend_on_parameters_are_refused():
    with pytest.raises(ValueError, match=r"`loss` must not make buffers .* shape \(2,\)"):
        todist.inner_loop(lambda net: net(), todist.sgd(lr=0.1), _Averaging(), 2, adjoint=todist.Replayed())


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"memory": 1.5}, TypeError, "`memory` must be a number of bytes or a string like '2GiB', got float"),
        ({"memory": "2 potatoes"}, ValueError, "`memory` must be like '2GiB'.*got '2 potatoes'"),
        ({"memory": 0}, ValueError, "`memory` must be above 0, got 0"),
        ({"snapshots": 0}, ValueError, "`snapshots` must be at least 1, got 0"),
        ({"snapshots": "many"}, TypeError, "`snapshots` must be a number or 'all', got 'many'"),
        ({"snapshots": 2, "memory": "1GB"}, ValueError, "say the same"),
        ({"store": 3}, TypeError, "`store` must be 'cpu' or a folder, got int"),
        ({"sweep": "back"}, ValueError, "`sweep` must be 'forward' or 'reverse', got 'back'"),
        ({"sweep": "reverse", "blocks": "auto"}, ValueError, "`sweep` must be 'forward' with `blocks`"),
    ],
)
def test_bad_settings(settings, error, text):
    with pytest.raises(error, match=text):
        todist.Replayed(**settings)


def test_a_budget_below_one_snapshot_says_what_it_takes():
    p = torch.ones(100, dtype=D, requires_grad=True)
    with pytest.raises(ValueError, match="one snapshot, which takes 1,600 bytes, got 1000"):
        todist.inner_loop(
            lambda p: p.sum(), todist.sgd(lr=0.1, momentum=0.9), p, 2, adjoint=todist.Replayed(memory=1000)
        )
    assert number_of_bytes("2GiB") == 2**31
    assert number_of_bytes("1.5 kB") == 1500


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch's compiler itself
def test_a_function_with_a_loop_in_it_compiles():
    p = torch.ones(3, dtype=D, requires_grad=True)

    def whole(p):
        adapted = todist.inner_loop(
            lambda w: (w**4).sum(), todist.sgd(lr=0.01), p, 2, adjoint=todist.Replayed()
        )
        return (adapted.params * p.cos()).sum()

    found = torch.autograd.grad(torch.compile(whole, backend="eager")(p), p)
    agree((found, torch.autograd.grad(whole(p), p)))


class _Operations(TorchDispatchMode):
    """The names of the operations that make large tensors, and of our own."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        flat = todist.pytree.flatten(made)[0]
        if func.namespace == "todist" or any(isinstance(x, Tensor) and x.numel() >= 100 for x in flat):
            self.names.append(func.name())
        return made


@pytest.mark.parametrize("make", [todist.adam, todist.adamw])
def test_a_plain_step_with_a_tensor_for_the_rate_is_one_operation(make):
    lr = torch.tensor(0.1, dtype=D, requires_grad=True)
    p, grad = torch.randn(100, dtype=D), torch.randn(100, dtype=D)
    optimizer, like = make(lr=lr), make(lr=0.1)
    with torch.no_grad(), _Operations() as done:
        moved, state = differentiable_step(optimizer, [p], [grad], optimizer.init([p]))
    assert len([name for name in done.names if name.startswith("todist::")]) == 1
    assert not any("foreach" in name or "mul" in name for name in done.names)
    expected, expected_state = differentiable_step(like, [p], [grad], like.init([p]))
    torch.testing.assert_close(moved, expected, rtol=0, atol=0)
    for one, other in zip(*(todist.pytree.flatten(s)[0] for s in (state, expected_state)), strict=True):
        assert torch.equal(one, other)
    moved, _state = differentiable_step(optimizer, [p], [grad], optimizer.init([p]))
    assert torch.autograd.grad(moved[0].sum(), lr)[0].any()


@pytest.mark.parametrize("make", [todist.adam, todist.adamw])
def test_backward_of_an_update_is_the_kernel_of_its_derivative(make):
    """And no step is made again for it, in lists or by a graph."""
    lr = torch.tensor(0.1, dtype=D, requires_grad=True)
    p = torch.randn(100, dtype=D, requires_grad=True)
    result = todist.inner_loop(
        lambda p: (p**4).sum(), make(lr=lr), p, 1, adjoint=todist.Replayed(sweep="reverse")
    )
    with _Operations() as done:
        torch.autograd.grad(result.params.sum(), (p, lr))
    ops = [name for name in done.names if name.startswith(("todist::", "aten::_foreach"))]
    assert ops == ["todist::adam_backward_"]


class _Sum(torch.autograd.Function):
    """The sum of products; a gradient of its gradient is the very tensor that it is given."""

    @staticmethod
    def forward(ctx, one, other):
        ctx.save_for_backward(one, other)
        return (one * other).sum()

    @staticmethod
    def backward(ctx, grad):
        one, other = ctx.saved_tensors
        return other.view_as(other), one.view_as(one)


@pytest.mark.parametrize("make", [todist.adam, todist.adamw])
def test_what_a_backward_overwrites_is_its_own(make):
    """Not the gradients that it was given, what a second one needs, or what the first one has found."""
    torch.manual_seed(0)
    p, weights = (torch.randn(20, dtype=D, requires_grad=True) for _ in range(2))
    lr = torch.tensor(0.1, dtype=D, requires_grad=True)
    given = torch.randn(20, dtype=D)

    def gradients(adjoint):
        optimizer = make(lr=lr)
        result = todist.inner_loop(
            lambda p: _Sum.apply(weights, p) + (p**4).sum(), optimizer, p, 7, meta=weights, adjoint=adjoint
        )
        outputs = (result.params, *todist.pytree.flatten(result.state)[0][:2])
        before = given.clone()
        found = [
            torch.autograd.grad(outputs, (p, weights, lr), [given] * 3, retain_graph=keep)
            for keep in (True, False)
        ]
        assert torch.equal(given, before)
        return found

    (expected, _again) = gradients(todist.Recorded())
    for settings in ({"snapshots": 2}, {"snapshots": "all"}):
        for found in gradients(todist.Replayed(**settings)):
            agree((found, expected))


class _Layers(nn.Module):
    """Weights that are used once, twice, without bias, transposed, frozen, and in a loss that has a gradient in it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 6, bias=False)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x):
        hidden = self.first(x).tanh()
        found = self.second(hidden) + 0.1 * self.frozen(self.second(hidden * hidden))
        return found + 0.1 * F.linear(F.linear(found, self.first.weight), self.first.weight.t()).tanh()


@pytest.mark.parametrize("settings", [{"snapshots": 2}, {"snapshots": "all"}], ids=str)
@pytest.mark.parametrize("penalty", [False, True])
def test_linear_layers_in_reverse_over_reverse_mode(settings, penalty):
    torch.manual_seed(0)
    net = _Layers().double()
    x = torch.randn(3, 4, 6, dtype=D)
    scale, lr = (torch.tensor(v, dtype=D, requires_grad=True) for v in (1.3, 0.05))

    def loss(net):
        given = (x * scale).requires_grad_()
        value = (net(given) - x).square().mean()
        if penalty:
            value = value + torch.autograd.grad(net(given).sum(), given, create_graph=True)[0].square().mean()
        return value

    def gradients(adjoint):
        made = todist.inner_loop(loss, todist.adam(lr=lr), net, 5, meta=scale, adjoint=adjoint)
        outer = (made.params(x) ** 2).sum()
        with _Operations() as done:
            found = torch.autograd.grad(outer, [scale, lr, *net.first.parameters(), net.second.weight])
        return found, done.names

    expected, _names = gradients(todist.Recorded())
    found, _names = gradients(todist.Replayed(sweep="reverse", **settings))
    agree((found, expected))


def test_sums_of_weights_gradients_are_made_by_the_products():
    net = nn.Sequential(nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 20))
    x, lr = torch.randn(4, 20), torch.tensor(0.1, requires_grad=True)
    made = todist.inner_loop(
        lambda net: net(x).square().mean(),
        todist.adam(lr=lr),
        net,
        3,
        adjoint=todist.Replayed(sweep="reverse"),
    )
    outer = sum(p.sum() for p in made.params.parameters())
    with _Operations() as done:
        torch.autograd.grad(outer, lr)
    large = [name for name in done.names if name in ("aten::mm", "aten::add.Tensor", "aten::addmm_")]
    # Each step has two for the second weight, of which one adds; all others are written where they are needed.
    assert sorted(large) == ["aten::addmm_"] * 3


def test_parameters_that_are_overwritten_before_backward_are_an_error():
    p = torch.ones(3, dtype=D, requires_grad=True)
    result = todist.inner_loop(lambda p: (p**3).sum(), todist.sgd(lr=0.1), p, 2, adjoint=todist.Replayed())
    with torch.no_grad():
        p.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.params.sum().backward()


def test_no_gradient_is_asked_of_what_has_none():
    p: Tensor = torch.ones(3, dtype=D, requires_grad=True)
    result = todist.inner_loop(lambda p: (p**2).sum(), todist.adam(lr=0.1), p, 0, adjoint=todist.Replayed())
    assert torch.equal(torch.autograd.grad(result.params.sum(), p)[0], torch.ones(3, dtype=D))
