"""``MetaOptimizer.run`` is the loop of its steps, with the gradient that its adjoint stands for."""

import pytest
import torch
from torch import nn

import torchopt_dist as todist

D = torch.float64


def setting():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 1)).double()
    weight = torch.tensor(0.7, dtype=D, requires_grad=True)
    lr = torch.tensor(0.1, dtype=D, requires_grad=True)
    xs = list(torch.randn(4, 5, 2, dtype=D))
    return net, weight, lr, xs


@pytest.mark.parametrize("adjoint", [todist.Recorded(), todist.Replayed(snapshots=1)])
def test_a_run_is_the_loop_of_its_steps(adjoint):
    def adapted(adjoint):
        net, weight, lr, xs = setting()
        first = [*net.parameters(), weight, lr]
        optimizer = todist.MetaAdam(net, lr=lr, eps=1e-3)

        def loss(net, x):
            return (weight * net(x)).square().mean()

        optimizer.step(loss(net, xs[0]))
        if adjoint is None:
            for x in xs[1:]:
                optimizer.step(loss(net, x))
        else:
            result = optimizer.run(loss, xs[1:], adjoint=adjoint, meta=weight)
            assert result.params is net
            assert result.losses.shape == (3,)
        optimizer.step(loss(net, xs[0]))  # from the last state on
        outer = sum((p**2).sum() for p in net.parameters())
        return outer, torch.autograd.grad(outer, first), net[1].running_mean

    torch.testing.assert_close(adapted(adjoint), adapted(None), rtol=1e-10, atol=1e-12)


def test_a_formula_of_torch_is_refused():
    optimizer = todist.differentiable(torch.optim.SGD, nn.Linear(1, 1), lr=0.1)
    with pytest.raises(TypeError, match="`run` needs a gradient transformation"):
        optimizer.run(lambda net: net.weight.sum(), 2)


def test_several_modules_are_refused():
    optimizer = todist.MetaSGD(nn.Linear(1, 1), lr=0.1)
    optimizer.add_param_group(nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"`run` needs an optimizer of one module, got 2: .*ModuleList"):
        optimizer.run(lambda net: net.weight.sum(), 2)
