"""The operations of a replay's backward: which kernels it calls, what it overwrites, and which products it makes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import torchopt_dist as todist
from tests.diff.replays import agree
from tests.rows import each_row
from torchopt_dist.transform.apply_updates import differentiable_step

D = torch.float64


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


@each_row("make", [todist.adam, todist.adamw])
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


@each_row("make", [todist.adam, todist.adamw])
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


STEPS = 23
OPTIMIZERS = {
    "adam": lambda lr: todist.adam(lr=lr, eps=1e-3, maximize=True),
    "a number": lambda lr: todist.adam(lr=0.05, eps=1e-3, eps_root=1e-6),
    "adamw": lambda lr: todist.adamw(lr=lr, weight_decay=0.5, eps=1e-3),
    "schedule": lambda lr: todist.adamw(lr=lambda step: lr / (1 + step), weight_decay=0.1, eps=1e-3),
}


@each_row("name", OPTIMIZERS)
def test_steps_of_known_gradients_are_gone_back_through_by_kernels(name):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3), nn.Linear(3, 3)).double()
    net[3].requires_grad_(False)
    lr, scale = (torch.tensor(v, dtype=D, requires_grad=True) for v in (0.05, 1.3))
    x = torch.randn(5, 3, dtype=D)
    kept = []

    def loss(net):
        kept.append((net[0].weight.detach(), net[0].weight.detach().clone()))
        return (net[3](net[:3](x)) - scale * x).square().mean()

    made, names = [], []
    for adjoint in (todist.Recorded(), todist.Replayed()):
        result = todist.inner_loop(loss, OPTIMIZERS[name](lr), net, STEPS, meta=scale, adjoint=adjoint)
        outer = sum((p**2).sum() for p in result.params.parameters()) + (result.losses**2).sum()
        with _Operations() as done:
            ins = [lr, scale, *net[:3].parameters()]
            made.append(torch.autograd.grad(outer, ins, allow_unused=True))
        names = [entry for entry in done.names if entry.startswith("todist::")]
    agree(made)
    assert names.count("todist::adam_backward") == STEPS  # no other way back through an update
    assert all(torch.equal(weight, was) for weight, was in kept)


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


@each_row("settings", [{"snapshots": 2}, {"snapshots": "all"}])
@each_row("penalty", [False, True])
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
    found, _names = gradients(todist.Replayed(**settings))
    agree((found, expected))
