"""Inner steps without second order: under ``torch.no_grad``, in inference mode, or by ``first_order=True``."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import torchopt_dist as todist
from tests.optim.graph import count_nodes
from tests.optim.programs import X, make, values
from tests.rows import each_row
from torchopt_dist.optim import MetaAdam, MetaSGD

Y = X.sum(1, keepdim=True)


class Learner(torch.nn.Module):
    """A module with the methods that a trainer such as Lightning's calls."""

    def __init__(self, optimizer):
        super().__init__()
        self.net = make()
        self.optimizer = optimizer

    def validation_step(self, batch, batch_idx):
        x, y = batch
        net = todist.module_clone(self.net)
        inner = self.optimizer(net)
        for _ in range(3):
            inner.step(lambda: F.mse_loss(net(x), y))
        return F.mse_loss(net(x), y), net


OPTIMIZERS = {
    "MetaSGD": lambda net: MetaSGD(net, 0.1, momentum=0.9),
    "MetaAdam": lambda net: MetaAdam(net, 0.1),
    "differentiable": lambda net: todist.differentiable(torch.optim.Adam, net, lr=0.1),
}


@each_row("context", [torch.no_grad, torch.inference_mode])
@each_row("name", OPTIMIZERS)
def test_a_validation_step_adapts_as_training_does_and_records_nothing(name, context):
    learner = Learner(OPTIMIZERS[name])
    want, _ = learner.validation_step((X, Y), 0)
    assert want.requires_grad
    learner.eval()
    with context():
        got, net = learner.validation_step((X.clone(), Y.clone()), 0)
        assert not torch.is_grad_enabled()
    assert not got.requires_grad
    torch.testing.assert_close(got.clone(), want.detach())
    assert all(p.is_leaf and p.requires_grad and not p.is_inference() for p in net.parameters())
    assert all(p.grad is None for p in learner.parameters())


def test_the_state_keeps_no_graph_either_and_training_goes_on_from_there():
    net = make()
    optimizer = MetaAdam(net, 0.1)
    with torch.no_grad():
        optimizer.step(lambda: F.mse_loss(net(X), Y))
    assert all(t.grad_fn is None for t in optimizer.get_states()[0][1].exp_avg.values())
    begun = list(net.parameters())
    optimizer.step(F.mse_loss(net(X), Y))
    grads = torch.autograd.grad(F.mse_loss(net(X), Y), begun)
    assert all(grad.abs().sum() > 0 for grad in grads)


def test_a_function_with_gradients_enabled_is_the_loss_that_it_computes():
    def end(as_function):
        net = make()
        first, optimizer = list(net.parameters()), MetaSGD(net, 0.1)
        for _ in range(2):
            optimizer.step((lambda: F.mse_loss(net(X), Y)) if as_function else F.mse_loss(net(X), Y))
        return torch.autograd.grad(F.mse_loss(net(X), Y), first)

    torch.testing.assert_close(end(True), end(False), rtol=0, atol=0)


def test_a_loss_without_a_graph_is_refused_with_what_to_write():
    net = make()
    optimizer = MetaSGD(net, 0.1)
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match=r"`optimizer.step\(lambda: loss\)`, and calls it with"),
    ):
        optimizer.step(F.mse_loss(net(X), Y))
    with pytest.raises(TypeError, match="`loss` must be a tensor, got float"):
        optimizer.step(lambda: 1.0)


def test_first_order_takes_the_gradients_for_constants():
    """``d end / d first`` is the gradient at the end, and that of a rate is minus the sum over the constants."""
    net, lr = make(torch.float64), torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
    x, y = X.double(), Y.double()
    first = list(net.parameters())
    optimizer = MetaSGD(net, lr)
    constants = []
    for _ in range(3):
        constants.append(torch.autograd.grad(F.mse_loss(net(x), y), list(net.parameters())))
        optimizer.step(F.mse_loss(net(x), y), first_order=True)
    end = [p.detach().requires_grad_() for p in net.parameters()]
    named = dict(zip(dict(net.named_parameters()), end, strict=True))
    want = torch.autograd.grad(F.mse_loss(torch.func.functional_call(net, named, (x,)), y), end)
    *got, of_lr = torch.autograd.grad(F.mse_loss(net(x), y), [*first, lr])
    torch.testing.assert_close(got, list(want), rtol=1e-12, atol=1e-14)
    moved = [sum(steps) for steps in zip(*constants, strict=True)]
    torch.testing.assert_close(of_lr, -sum((a * b).sum() for a, b in zip(moved, want, strict=True)))


def test_first_order_records_a_few_nodes_a_step_and_moves_as_the_second_does():
    counts, ends = [], []
    for first_order in (True, False):
        net = make()
        optimizer = MetaAdam(net, 0.1)
        for _ in range(5):
            optimizer.step(F.mse_loss(net(X), Y), first_order=first_order)
        counts.append(count_nodes(*net.parameters()))
        ends.append(values(net))
    torch.testing.assert_close(*ends)
    assert counts[0] * 4 < counts[1]


def test_first_order_leaves_the_graph_of_shared_features_for_the_outer_loss():
    torch.manual_seed(0)
    encoder, head = torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)
    features = torch.tanh(encoder(X))
    MetaSGD(head, 0.1).step(F.mse_loss(head(features), Y), first_order=True)
    F.mse_loss(head(features), Y).backward()
    assert encoder.weight.grad.abs().sum() > 0
