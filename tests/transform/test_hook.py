import copy
import math
import pickle

import pytest
import torch
from torch import nn
from torch.func import grad, vmap

from tests.rows import each_row
from torchopt_dist.optim import FuncOptimizer, MetaOptimizer, Optimizer
from torchopt_dist.transform.base import EmptyState, chain
from torchopt_dist.transform.hook import nan_to_num_hook, register_hook, zero_nan_hook
from torchopt_dist.transform.scale import scale


def double(g):
    return 2 * g


def square(g):
    return g**2


def nothing(g):
    return None


def test_the_hook_runs_on_the_gradient_of_each_update():
    a, b = (torch.ones(2, requires_grad=True) for _ in range(2))
    updates, state = register_hook(double).update([a * 3, b], EmptyState())
    assert state == EmptyState()
    assert torch.equal(updates[0], 3 * torch.ones(2))
    slopes = torch.autograd.grad((updates[0] + 5 * updates[1]).sum(), (a, b))
    assert [slope.tolist() for slope in slopes] == [[6.0, 6.0], [10.0, 10.0]]


def test_a_hook_may_return_none():
    a = torch.ones(2, requires_grad=True)
    updates, _ = register_hook(nothing).update([a], EmptyState())
    assert torch.equal(torch.autograd.grad(updates[0].sum(), a)[0], torch.ones(2))


def test_the_given_tensor_gets_no_hook():
    a = torch.ones(2, requires_grad=True)
    impl = register_hook(double)
    for _ in range(3):
        impl.update([a], EmptyState())
    assert torch.equal(torch.autograd.grad(a.sum(), a)[0], torch.ones(2))


def test_the_anchor_tensors_that_do_not_require_grad_are_skipped():
    plain, leaf = torch.ones(2), torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError, match="doesn't require gradient"):
        plain.register_hook(double)
    updates, _ = register_hook(double).update({"a": plain, "b": None, "c": leaf}, EmptyState())
    assert updates["a"] is plain
    assert updates["b"] is None
    assert torch.autograd.grad(updates["c"].sum(), leaf)[0][0] == 2
    with torch.no_grad():
        register_hook(double).update([leaf], EmptyState())


def test_the_second_derivative_goes_through_the_hook():
    a = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    updates, _ = register_hook(square).update([a], EmptyState())
    (slope,) = torch.autograd.grad(updates[0] ** 3, a, create_graph=True)
    assert slope.item() == (3 * 9) ** 2
    (bend,) = torch.autograd.grad(slope, a)
    # The slope is h(3 u²) with h = g², and u goes through the hook too: h(2 · 27 · 18) of its gradient.
    assert bend.item() == (2 * 27 * 18) ** 2


def test_func_grad_and_vmap():
    def loss(x):
        return (register_hook(double).update([x], EmptyState())[0][0] ** 2).sum()

    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert torch.equal(grad(loss)(x), 4 * x)
    assert torch.equal(vmap(grad(loss))(x), 4 * x)


@each_row("hook", [zero_nan_hook, nan_to_num_hook(0.0, 9.0)])
def test_a_meta_gradient_is_repaired(hook):
    """A loss beyond the step whose gradient is NaN in one entry: without the hook, the whole of ``lr`` is lost."""
    lr = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    w = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    nan = torch.tensor([math.nan, 1.0], dtype=torch.float64)

    def meta_gradient(*links):
        moved = FuncOptimizer(chain(scale(lr), *links, scale(-1.0))).step((w**2).sum(), (w,))[0]
        return torch.autograd.grad(moved, lr, nan)[0]

    assert meta_gradient().isnan()
    assert meta_gradient(register_hook(hook)).item() == -4.0


def test_it_runs_in_every_optimizer():
    impl = chain(register_hook(double), scale(-0.5))
    net = nn.Linear(2, 1, bias=False)
    first = net.weight
    MetaOptimizer(net, impl).step((net.weight**2).sum() / 2)
    # 1 - 0.5, the latter through the hook
    assert torch.equal(torch.autograd.grad(net.weight.sum(), first)[0], torch.zeros(1, 2))
    p = torch.ones(2, requires_grad=True)
    p.grad = torch.ones(2)
    Optimizer([p], impl).step()
    assert p.tolist() == [0.5, 0.5]


@each_row("again", [copy.deepcopy, lambda impl: pickle.loads(pickle.dumps(impl))])
@each_row("hook", [zero_nan_hook, nan_to_num_hook(5.0)])
def test_copies_and_pickles(hook, again):
    a = torch.ones(1, requires_grad=True)
    updates, _ = again(register_hook(hook)).update(a, EmptyState())
    (slope,) = torch.autograd.grad(updates, a, torch.tensor([math.nan]))
    assert slope.item() == hook(torch.tensor(math.nan)).item()


def test_zero_nan_hook():
    assert zero_nan_hook(torch.tensor([math.nan, -math.inf, 2.0])).tolist() == [0.0, -math.inf, 2.0]
    assert zero_nan_hook(torch.tensor([complex(1, math.nan), 1j])).tolist() == [0j, 1j]
    assert zero_nan_hook(torch.ones(2, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert torch.equal(vmap(zero_nan_hook)(torch.tensor([[math.nan], [1.0]])), torch.tensor([[0.0], [1.0]]))


@each_row("args", [(), (1.0,), (1.0, 2.0, -3.0)])
def test_nan_to_num_hook_is_torchs(args):
    wild = torch.tensor([math.nan, math.inf, -math.inf, 2.0])
    assert torch.equal(nan_to_num_hook(*args)(wild), torch.nan_to_num(wild, *(args or (0.0,))))


def test_bad_arguments_are_refused():
    with pytest.raises(TypeError, match="`hook` must be callable, got NoneType"):
        register_hook(None)
    with pytest.raises(TypeError, match="`nan` must be a number, got str"):
        nan_to_num_hook("0")
