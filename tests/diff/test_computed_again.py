"""A recorded loss of which a backward pass computes a part again, whoever keeps the module → its step's parameters.

Each loss is compared with one of the same value that keeps tensors only.
"""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

import torchopt_dist as todist
from tests.rows import each_row

STEPS = 3


def _again(function, x, again):
    return checkpoint(function, x, use_reentrant=False) if again else function(x)


def _in_a_part(net, part, x, again):
    return net.last(_again(lambda x: torch.tanh(part(x)), x, again))


def _in_an_attribute(net, x, again):
    blocks = net.blocks  # the closure holds this list alone
    return _again(lambda x: blocks[1](torch.tanh(blocks[0](x))), x, again)


def _in_a_dictionary(net, x, again):
    own = net.first[0]._parameters
    return net.last(_again(lambda x: torch.tanh(linear(x, own["weight"], own["bias"])), x, again))


def _in_a_dictionary_of_parts(net, x, again):
    parts = net._modules
    return _again(lambda x: parts["last"](torch.tanh(parts["first"](x))), x, again)


def _in_a_hook(net, x, again):
    hidden = torch.tanh(net.first(x))
    last = net.last.weight.detach()
    hidden.register_hook(lambda g: g * (net.last.weight.detach() if again else last).sum())
    return net.last(hidden)


class _Scaled(torch.autograd.Function):
    """The identity, whose derivative it takes to be a sum of weights."""

    @staticmethod
    def forward(ctx, x, weight_of):
        ctx.weight_of = weight_of
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.weight_of().detach().sum(), None


def _in_a_function(net, x, again):
    weight = net.last.weight
    return net.last(
        _Scaled.apply(torch.tanh(net.first(x)), (lambda: net.last.weight) if again else lambda: weight)
    )


LOSSES = {
    "module": lambda net, x, again: _again(net, x, again),
    "part": lambda net, x, again: _in_a_part(net, net.first, x, again),
    "part of a part": lambda net, x, again: _in_a_part(net, net.first[0], x, again),
    "attribute": _in_an_attribute,
    "dictionary": _in_a_dictionary,
    "dictionary of parts": _in_a_dictionary_of_parts,
    "hook": _in_a_hook,
    "function": _in_a_function,
}


class _Net(nn.Module):
    def __init__(self, *, listed=False, tied=False):
        super().__init__()
        self.first, self.last = nn.Sequential(nn.Linear(3, 3)), nn.Linear(3, 3)
        if tied:
            self.last.weight = self.first[0].weight
        if listed:
            self.blocks = [self.first, self.last]

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


def _net(**options):
    torch.manual_seed(0)
    return _Net(**options).double(), torch.randn(5, 3, dtype=torch.float64)


@each_row("tied", [False, True])
@each_row("name", LOSSES)
def test_it_has_the_parameters_of_the_step(name, tied):
    def found(again):
        net, x = _net(listed=name == "attribute", tied=tied)
        lr = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
        loss = LOSSES[name]
        made = todist.inner_loop(
            lambda net: loss(net, x, again).square().mean(),
            todist.sgd(lr=lr),
            net,
            STEPS,
            adjoint=todist.Recorded(),
        )
        return torch.autograd.grad(made.params(x).square().sum(), [lr, *net.parameters()])

    torch.testing.assert_close(found(True), found(False), rtol=1e-12, atol=1e-14)


@each_row("use_reentrant", [False, True])
def test_only_a_backward_pass_of_the_caller_may_compute_it_again(use_reentrant):
    """The gradient of a step does not see what else the loss returns."""

    def found(again):
        net, x = _net()
        x.requires_grad_()

        def loss(net):
            seen = checkpoint(net, x, use_reentrant=use_reentrant) if again else net(x)
            return net(x).square().mean(), seen.square().sum()

        made = todist.inner_loop(
            loss, todist.sgd(lr=0.3), net, STEPS, meta=x, has_aux=True, adjoint=todist.Recorded()
        )
        made.aux[1].backward()  # of a step after which there is another one
        return [x.grad, *(p.grad for p in net.parameters())]

    torch.testing.assert_close(found(True), found(False), rtol=1e-12, atol=1e-14)


def test_a_weak_reference_is_no_way_to_later_parameters():
    net, x = _net()

    def loss(net):
        weak = weakref.ref(net)
        return checkpoint(lambda x: weak()(x), x, use_reentrant=False).square().mean()

    with pytest.raises(TypeError, match="NoneType"):
        todist.inner_loop(loss, todist.sgd(lr=0.3), net, STEPS, adjoint=todist.Recorded())


@each_row(
    "net",
    [
        nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Linear(4, 3)),
        nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 2, 2, padding=(1,)), nn.Flatten()),
        nn.TransformerEncoderLayer(3, 1, 4, batch_first=True),
    ],
    ids=["layers", "convolution", "transformer"],
)
def test_a_module_that_nobody_keeps_is_one_for_all_steps(net):
    seen = set()

    def loss(net):
        seen.add(id(net))  # a copy exists beside the one that it is made of
        return net(torch.ones(5, 3)).square().mean()

    todist.inner_loop(loss, todist.sgd(lr=0.1), net, STEPS, adjoint=todist.Recorded())
    assert len(seen) == 1
