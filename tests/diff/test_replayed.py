"""Replayed loops have the gradient of recorded ones, whatever the loss is made of."""

from __future__ import annotations

import functools
import itertools
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchopt_dist as todist
from tests.diff.adjoint_table import Problem, gradients
from tests.diff.replays import agree, both
from tests.rows import each_row

D = torch.float64


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

ZEROS = torch.tensor([1.0, 0.0, 0.0], dtype=D)

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
    "prod with two zeros": lambda p, q: ((p * ZEROS).prod(1) * q[:, 0]).sum() + (p**2).sum(),
    "sign": lambda p, q: (torch.sgn(p) * p**2 * q).sum(),
    "a custom function": lambda p, q: (_Cube.apply(p) * q).sum(),
    "solve": lambda p, q: torch.linalg.solve(p[:3] + 5 * torch.eye(3, dtype=D), q[:3]).square().sum(),
    "cholesky": lambda p, q: torch.linalg.cholesky(p.T @ p + torch.eye(3, dtype=D)).sum() * q.sum(),
    "max_pool": lambda p, q: (F.max_pool2d((p * q)[None, None], 2) ** 3).sum(),
}


@each_row("name", LOSSES)
def test_operations_have_the_gradients_of_recorded_steps(name):
    torch.manual_seed(0)
    p = torch.randn(4, 3, dtype=D, requires_grad=True)
    q = torch.rand(4, 3, dtype=D, requires_grad=True)
    for snapshots in (None, 1):
        replayed = todist.Replayed(snapshots=snapshots)
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


def test_loops_in_two_threads_draw_from_generators_of_their_own():
    x = torch.linspace(-1, 1, 12, dtype=D).reshape(4, 3)

    def gradient(seed):
        w = torch.linspace(0.1, 1, 9, dtype=D).reshape(3, 3).requires_grad_()

        def loss(w):
            kept = torch.rand(4, 3, generator=torch.Generator().manual_seed(seed)) < 0.5
            return (F.layer_norm(x @ w, (3,)) * kept - w.sum()).square().mean() / 9

        adjoint = todist.Replayed(snapshots=1)
        adapted = todist.inner_loop(loss, todist.sgd(lr=0.1), w, 3, adjoint=adjoint)
        return torch.autograd.grad(adapted.params.square().sum(), w)[0]

    expected = [gradient(seed) for seed in (1, 2)]
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(gradient, (1, 2)))
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
    for adjoint in (todist.Replayed(), todist.Replayed(snapshots=1)):
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

    recorded = list(derivatives(todist.Recorded(), a, p, lr))
    replayed = list(derivatives(todist.Replayed(snapshots=2), a, p, lr))
    for one, other in zip(replayed, recorded, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)
    outer = functools.partial(lambda *ins: next(derivatives(todist.Replayed(), *ins)))
    assert torch.autograd.gradcheck(outer, (a, p, lr), eps=1e-5)


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
    optimizer = todist.transform.GradientTransformation(
        todist.transform.identity().init, _scaled_by_what_is_hidden
    )

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


@each_row(
    ("settings", "error", "text"),
    [
        ({"memory": 1.5}, TypeError, "`memory` must be a number of bytes or a string like '2GiB', got float"),
        ({"memory": "2 potatoes"}, ValueError, "`memory` must be like '2GiB'.*got '2 potatoes'"),
        ({"memory": 0}, ValueError, "`memory` must be above 0, got 0"),
        ({"snapshots": 0}, ValueError, "`snapshots` must be at least 1, got 0"),
        ({"snapshots": "many"}, TypeError, "`snapshots` must be a number or 'all', got 'many'"),
        ({"snapshots": 2, "memory": "1GB"}, ValueError, "say the same"),
        ({"store": 3}, TypeError, "`store` must be 'cpu' or a folder, got int"),
        ({"sweep": "forward"}, TypeError, "`sweep`, which is no longer an option"),
    ],
)
def test_bad_settings(settings, error, text):
    with pytest.raises(error, match=text):
        todist.Replayed(**settings)


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


@pytest.mark.filterwarnings("ignore")  # torch's, of TorchScript; and that steps are recorded
def test_a_part_of_a_loss_in_torchscript_takes_no_tangents_and_is_recorded():
    program = torch.jit.CompilationUnit("def part(w: Tensor, m: Tensor):\n    return (w * m).sin().sum()\n")
    m = torch.tensor([0.7, 1.2], dtype=D, requires_grad=True)
    w = torch.tensor([0.5, -0.3], dtype=D, requires_grad=True)
    adjoint = todist.Replayed(snapshots=1)
    agree(both(lambda w: program.part(w, m), w, 4, ins=[w, m], replayed=adjoint, meta=m))


def test_no_steps_have_derivatives_of_every_order():
    w = torch.tensor([2.0, 3.0], dtype=D, requires_grad=True)
    x = torch.ones(2, dtype=D, requires_grad=True)
    made = todist.inner_loop(
        lambda w: ((w - x) ** 2).sum(), todist.sgd(lr=0.1), w, 0, meta=x, adjoint=todist.Replayed()
    )
    (first,) = torch.autograd.grad((made.params**3).sum(), w, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), w)
    assert first.tolist() == [12, 27]
    assert second.tolist() == [12, 18]


@pytest.mark.parametrize("small", [0, 1 << 24])
@pytest.mark.parametrize("snapshots", [1, None])
def test_a_step_that_is_not_the_same_when_it_is_run_again_is_named(snapshots, small, monkeypatch):
    monkeypatch.setattr("torchopt_dist.diff.adjoints._store.SMALL", small)
    w, factors = torch.ones(3, dtype=D, requires_grad=True), itertools.count(1)
    result = todist.inner_loop(
        lambda w: (w**2).sum() * next(factors),
        todist.sgd(lr=0.01),
        w,
        3,
        adjoint=todist.Replayed(snapshots=snapshots),
    )
    step = (
        "step 2 was" if snapshots is None else "step 0 was 3, and is now 12"
    )  # the last one is gone through first
    with pytest.raises(RuntimeError, match=f"the loss of {step}"):
        torch.autograd.grad(result.params.sum(), w)
