"""Small networks, their losses, and loops over the steps of an optimizer, for the tests beside this file."""

from __future__ import annotations

import torch
from torch import nn

from torchopt_dist.optim import apply_updates

DOUBLE = torch.float64
X = torch.randn(6, 3, generator=torch.Generator().manual_seed(3))


class Complex(nn.Module):
    """A network of complex numbers that ``nn.Linear`` does not warn about."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(s, dtype=torch.complex64) / 2) for s in ((3, 4), (4, 1)))

    def forward(self, x):
        h = torch.view_as_complex(torch.tanh(torch.view_as_real(x @ self.a)))  # tanh itself has poles
        return h @ self.b


def make(dtype=torch.float32):
    torch.manual_seed(0)
    if dtype.is_complex:
        return Complex()
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(dtype)


def losses(dtype, maximize=False, count=50):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        x = torch.randn(5, 3, generator=generator, dtype=DOUBLE).to(dtype)

        def loss(forward, x=x):
            value = (forward(x) - x.sum(1, keepdim=True)).abs().square().mean()
            return -value if maximize else value

        yield loss


def flat(params):
    return torch.cat([p.detach().flatten() for p in params])


def unroll(row, params, hyper, grad_of, steps=3):
    """Parameters after some functional steps."""
    impl = row.function(**hyper)
    state = impl.init(params)
    for _ in range(steps):
        updates, state = impl.update(grad_of(params), state, params=params, inplace=False)
        params = apply_updates(params, updates, inplace=False)
    return params


def inner_loss(params):
    a, b = params
    return (a.sin() * b).sum() + 0.3 * a.pow(3).sum() + 0.5 * b.pow(2).sum()


def recorded_grad(params):
    return torch.autograd.grad(inner_loss(params), params, create_graph=True)


def loss_of(net):
    return net(X.to(net[0].weight.dtype)).square().mean()


def run(net, optimizer, steps):
    for _ in range(steps):
        optimizer.step(loss_of(net))


def values(net):
    return [p.detach().clone() for p in net.parameters()]


def same(one, two):
    return all(torch.equal(p, q) for p, q in zip(values(one), values(two), strict=True))
