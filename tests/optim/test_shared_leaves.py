"""One tensor at two leaves of the parameters: it moves once and stays tied."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

import torchopt_dist as todist
from tests.rows import each_row

X = torch.ones(1, 2)


def make():
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    net[1].weight = net[0].weight
    nn.init.constant_(net[0].weight, 0.5)
    return net, dict(net.named_parameters(remove_duplicate=False))


def loss_of(net, params):
    return functional_call(net, params, (X,)).sum()


@each_row("inplace", [False, True])
@each_row(
    "impl",
    [
        todist.sgd(0.1, momentum=0.9),
        todist.adam(0.1),
        todist.chain(todist.transform.clip_grad_norm(0.5), todist.sgd(0.1)),
        todist.sgd(0.1, weight_decay=0.1, momentum=0.9),
    ],
)
def test_a_tied_parameter_moves_once_and_stays_tied(impl, inplace):
    net, params = make()
    optimizer = todist.FuncOptimizer(impl, inplace=inplace)
    again, _ = make()
    by_module = todist.MetaOptimizer(again, impl)
    for _ in range(3):
        params = optimizer.step(loss_of(net, params), params)
        by_module.step(again(X).sum())
        assert list(params) == ["0.weight", "1.weight"]
        assert params["0.weight"] is params["1.weight"]
        torch.testing.assert_close(params["0.weight"], again[0].weight)


def test_the_gradient_flows_to_the_one_tensor():
    w = torch.tensor(2.0, requires_grad=True)
    optimizer = todist.FuncOptimizer(todist.sgd(0.1))
    a, b, none = optimizer.step(w**3, (w, w, None))
    assert a is b
    assert none is None
    (grad,) = torch.autograd.grad(a * b, w)
    torch.testing.assert_close(grad, 2 * (w - 0.3 * w**2) * (1 - 0.6 * w))


def test_a_frozen_tied_parameter_stays():
    w, frozen = torch.ones(1, requires_grad=True), torch.ones(1)
    moved = todist.FuncOptimizer(todist.sgd(0.1)).step((w * frozen).sum(), [frozen, w, frozen])
    assert moved[0] is frozen
    assert moved[2] is frozen


def test_leaves_untied_later_go_on_each_by_itself():
    w = torch.ones(1, requires_grad=True)
    optimizer = todist.FuncOptimizer(todist.sgd(1.0, momentum=0.9))
    optimizer.step(w.sum(), [w, w])
    a, b = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
    moved = optimizer.step((a + b).sum(), [a, b])
    assert [p.item() for p in moved] == pytest.approx([-1.9, -1.0])


def test_updates_of_one_tensor_at_two_leaves_are_refused_in_place():
    w, other = torch.zeros(1), torch.zeros(1)
    with pytest.raises(ValueError, match=r"`params` must be different tensors .* at leaves 0 and 2"):
        todist.apply_updates([w, other, w], [torch.ones(1)] * 3)
    assert w.item() == other.item() == 0
    todist.apply_updates([w, other, w], [torch.ones(1), torch.ones(1), None])
    assert w.item() == other.item() == 1
    moved = todist.apply_updates([w, w], [torch.ones(1), 2 * torch.ones(1)], inplace=False)
    assert [p.item() for p in moved] == [2, 3]
