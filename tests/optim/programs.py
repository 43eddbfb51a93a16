"""Small networks, their losses, and loops over the steps of an optimizer, for the tests beside this file."""

from __future__ import annotations

import copy
import io
import pickle

import torch
from torch import nn

from tests.optim.graph import count_nodes
from torchopt_dist.nn import extract_state_dict, module_clone, recover_state_dict, stop_gradient
from torchopt_dist.optim import apply_updates

DOUBLE = torch.float64


def drawn(*shape, seed, dtype=torch.float32):
    """The same numbers on each device, on the one that is the default."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=dtype, generator=generator, device="cpu").to(torch.get_default_device())


X = drawn(6, 3, seed=3)


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


def losses(dtype, maximize=False, count=30):
    for rows in drawn(count, 5, 3, seed=1, dtype=DOUBLE):
        x = rows.to(dtype)

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
    return net(X.to(next(net.parameters()).dtype)).square().mean()


def run(net, optimizer, steps):
    for _ in range(steps):
        optimizer.step(loss_of(net))


def values(net):
    return [p.detach().clone() for p in net.parameters()]


def same(one, two):
    return all(torch.equal(p, q) for p, q in zip(values(one), values(two), strict=True))


AGAIN = [
    copy.deepcopy,
    lambda optimizer: pickle.loads(pickle.dumps(optimizer)),
    lambda optimizer: module_clone(optimizer, by="reference"),
    lambda optimizer: module_clone(optimizer, by="copy"),
    lambda optimizer: module_clone(optimizer, by="deepcopy"),
]
"""Ways to a second optimizer with a module of its own."""


def assert_a_resumed_run_equals_an_unbroken_one(optimize, half=3):
    """Bit for bit, by way of a file; ``optimize`` makes an optimizer of a network."""
    unbroken, begun, fresh = make(), make(), make()
    run(unbroken, optimize(unbroken), half + 3)
    optimizer = optimize(begun)
    run(begun, optimizer, half)
    file = io.BytesIO()
    torch.save((begun.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    net_state, state = torch.load(file, weights_only=True)
    fresh.load_state_dict(net_state)
    optimizer = optimize(fresh)
    optimizer.load_state_dict(state)
    run(fresh, optimizer, 3)
    assert same(unbroken, fresh)


def assert_copies_go_on_alike_and_apart(optimize, again):
    net = make()
    optimizer = optimize(net)
    run(net, optimizer, 2)
    other = again(optimizer)
    assert type(other) is type(optimizer)
    (other_net,) = other.modules
    before = values(net)
    run(other_net, other, 2)
    assert all(torch.equal(p, q) for p, q in zip(values(net), before, strict=True))
    run(net, optimizer, 2)
    assert same(net, other_net)


def assert_the_graph_stays_flat(net, optimizer, way, held, steps):
    """However many steps there are, each cut off from the last; ``held`` gives the optimizer's own tensors."""
    start = extract_state_dict(net), extract_state_dict(optimizer)
    sizes = []
    for step in range(steps):
        optimizer.step(loss_of(net))
        if step in (10, steps - 1):
            sizes.append(count_nodes(loss_of(net), *held(optimizer.get_states()[0])))
        if way == "stop_gradient":
            stop_gradient(net)
            stop_gradient(optimizer)
        else:
            recover_state_dict(net, start[0])
            recover_state_dict(optimizer, start[1])
    assert sizes[0] == sizes[1]
    assert all(p.requires_grad for p in net.parameters())
