"""The differentiable step of SGD as a whole, by the kernel and by the formula → its links' and torch's numbers."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck

import torchopt_dist as todist
from tests.ops.cases import needs_kernels
from tests.rows import each_row
from torchopt_dist.optim.meta_optimizer import MetaOptimizer
from torchopt_dist.transform.base import ChainedGradientTransformation
from torchopt_dist.transform.trace import TraceState

OPTIONS = [
    {},
    {"weight_decay": 0.1},
    {"maximize": True},
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.3, "maximize": True},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
]
every = pytest.mark.parametrize("options", OPTIONS, ids=str)
FUSED = [None, False, pytest.param(True, marks=needs_kernels)]


class Net(nn.Module):
    """Leaves of several shapes, one without a gradient, one that is complex."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Parameter(torch.randn(3, 2, dtype=dtype))
        self.unused = nn.Parameter(torch.randn(2, dtype=dtype))
        self.b = nn.Parameter(torch.randn((), dtype=dtype))
        self.c = nn.Parameter(torch.randn(2, dtype=dtype.to_complex()))

    def forward(self):
        return (self.a.sin() * self.b).sum() + (self.c * self.a).abs().square().sum() * 0.1


def links(impl):
    """The same transformation without its whole steps."""
    return ChainedGradientTransformation(*impl.transformations)


def unrolled(impl, steps=3, dtype=torch.float64):
    net = Net(dtype)
    first = list(net.parameters())
    optimizer = MetaOptimizer(net, impl)
    for _ in range(steps):
        optimizer.step(net())
    return first, list(net.parameters()), optimizer


@every
@pytest.mark.parametrize("fused", FUSED)
def test_it_is_what_the_links_make(options, fused):
    found = []
    for impl in (todist.sgd(0.1, fused=fused, **options), links(todist.sgd(0.1, **options))):
        first, last, optimizer = unrolled(impl)
        loss = sum(x.abs().pow(2).sum() for x in last)
        grads = torch.autograd.grad(
            loss, [x for x in first if x.shape != (2,) or x.is_complex()], create_graph=True
        )
        bent = torch.autograd.grad(sum(g.abs().pow(2).sum() for g in grads), first[0])
        found.append((last, grads, bent, optimizer.state_dict()["state"]))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want)
    assert found[0][3][0].keys() == found[1][3][0].keys()


@every
@pytest.mark.parametrize("fused", FUSED)
def test_thirty_steps_equal_torch_and_the_formula(options, fused):
    twin, ours, formula = (
        nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double() for _ in range(3)
    )
    for net in (ours, formula):
        net.load_state_dict(twin.state_dict())
    theirs = torch.optim.SGD(twin.parameters(), 0.05, **options)
    mine = todist.MetaSGD(ours, 0.05, fused=fused, **options)
    other = todist.MetaSGD(formula, 0.05, fused=False, **options)
    sign = -1 if options.get("maximize") else 1
    for _ in range(30):
        x = torch.randn(5, 3, dtype=torch.float64)
        theirs.zero_grad()
        losses = [sign * (net(x) - x.sum(1, keepdim=True)).square().mean() for net in (twin, ours, formula)]
        losses[0].backward()
        theirs.step()
        mine.step(losses[1])
        other.step(losses[2])
        for optimizer in (mine, other):
            todist.stop_gradient(optimizer)
        for net in (ours, formula):
            todist.stop_gradient(net)
    for want, *got in zip(twin.parameters(), ours.parameters(), formula.parameters(), strict=True):
        for tensor in got:
            torch.testing.assert_close(tensor.detach(), want.detach(), rtol=1e-12, atol=1e-12)


@every
@pytest.mark.parametrize("fused", FUSED)
def test_derivatives_through_three_steps(options, fused):
    def unroll(a, b):
        impl, params = todist.sgd(0.1, fused=fused, **options), {"a": a, "b": b}
        optimizer = todist.FuncOptimizer(impl)
        for _ in range(3):
            params = optimizer.step((params["a"].sin() * params["b"]).sum() + params["b"] ** 3, params)
        return params["a"], params["b"]

    torch.manual_seed(0)
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 2), ())]
    assert gradcheck(unroll, leaves)
    assert gradgradcheck(unroll, leaves)


@needs_kernels
@each_row("options", OPTIONS[3:])
def test_the_first_sums_get_their_gradients(options):
    """They are leaves of a `MetaSGD`, so that one can learn them."""
    found = []
    for fused in (True, False):
        net = Net()
        optimizer = todist.MetaSGD(net, 0.1, fused=fused, **options)
        (state,) = (own for own in optimizer.get_states()[0] if isinstance(own, TraceState))
        optimizer.step(net())
        loss = sum(p.abs().pow(2).sum() for name, p in net.named_parameters() if name != "unused")
        sums = [own for name, own in state.momentum_buffer.items() if name != "unused"]
        found.append(torch.autograd.grad(loss, sums))
    torch.testing.assert_close(*found)
    assert all(grad.abs().sum() > 0 for grad in found[0])


@every
def test_copies_go_on_alike(options):
    impl = todist.sgd(0.1, **options)
    others = [copy.deepcopy(impl), pickle.loads(pickle.dumps(impl))]
    results = [unrolled(each)[1] for each in (impl, *others)]
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=0)


@every
def test_a_step_without_any_gradient_changes_nothing(options):
    impl = todist.sgd(0.1, **options)
    params = {"w": torch.ones(2)}
    state = impl.init(params)
    moved, after = impl.fused_step.differentiable(params, {"w": None}, state)
    assert moved["w"] is params["w"]
    torch.testing.assert_close(after, state)


@needs_kernels
def test_a_kernel_that_is_demanded_is_used(monkeypatch):
    for hyper in (
        {"lr": torch.tensor(0.1)},
        {"lr": lambda t: 0.1},
        {"lr": 0.1, "momentum": torch.tensor(0.9)},
    ):
        with pytest.raises(
            RuntimeError, match="`fused=True` cannot be used: the kernel takes hyper-parameters that"
        ):
            todist.sgd(**hyper, fused=True)
    nodes = {}
    for fused in (None, False, True):
        for momentum in (0.0, 0.9):
            _, last, _ = unrolled(todist.sgd(0.1, momentum, fused=fused))
            nodes[fused, momentum] = last[0].grad_fn.name()
    assert nodes[True, 0.0] == nodes[True, 0.9] == nodes[None, 0.9] == "OptimizerStepBackward"
    assert "OptimizerStepBackward" not in (nodes[False, 0.0], nodes[False, 0.9], nodes[None, 0.0])
    monkeypatch.setattr("torchopt_dist.ops.library._KERNELS", frozenset())
    for momentum in (0.0, 0.9):
        with pytest.raises(RuntimeError, match=r"`fused=True` cannot be used: .*`sgd` has no CPU kernel"):
            unrolled(todist.sgd(0.1, momentum, fused=True))
        unrolled(todist.sgd(0.1, momentum))


@each_row("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_dtypes(dtype):
    """The kernel's outer gradients are those of float64 to the dtype's own rounding of three steps."""
    found = []
    for wide in (True, False):
        w = torch.linspace(-1, 1, 9).to(dtype).to(torch.float64 if wide else dtype).requires_grad_()
        optimizer, params = todist.FuncOptimizer(todist.sgd(0.125, 0.5, nesterov=True)), [w]
        for _ in range(3):
            params = optimizer.step((params[0] ** 2).sum(), params)
        found.append(torch.autograd.grad((params[0] ** 2).sum(), w)[0])
    assert found[1].dtype == dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(found[1].double(), found[0], rtol=8 * eps, atol=2 * eps)


@each_row("momentum", [0.0, 0.9])
def test_sparse_gradients(momentum):
    found = []
    for sparse in (True, False):
        torch.manual_seed(0)
        table = nn.Embedding(5, 2, sparse=sparse)
        first, optimizer = table.weight, todist.MetaSGD(table, 0.1, momentum)
        for _ in range(2):
            optimizer.step(table(torch.tensor([1, 2])).square().sum())
        found.append((table.weight, torch.autograd.grad(table.weight.pow(2).sum(), first)))
    torch.testing.assert_close(*found)
