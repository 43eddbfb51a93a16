"""``docs/api``'s pages of inner loops and modules: each line against an unrolled loop or a closed form."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import torchopt_dist as todist
from tests.docs.promises.register import numbers, promises, same

loops, modules = (partial(promises, page) for page in ("inner_loops", "modules"))

A = torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=torch.float64)
LR = 0.1


def loss(params: Tensor, meta: Tensor) -> Tensor:
    """Its Hessian is ``A + 0.12 diag(x²)``, and its gradient's derivative by ``meta`` minus the identity."""
    return 0.5 * params @ A @ params - params @ meta + 0.01 * (params**4).sum()


def unrolled(start: Tensor, meta: Tensor, steps: int, *, first_order: bool = False) -> Tensor:
    x = start
    for _ in range(steps):
        (grad,) = torch.autograd.grad(loss(x, meta), x, create_graph=not first_order)
        x = x - LR * grad
    return x


def leaves() -> tuple[Tensor, Tensor]:
    return numbers(1.0, -2.0).requires_grad_(), numbers(0.5, 0.3).requires_grad_()


def trained(start: Tensor, meta: Tensor, steps: int, adjoint: Any) -> Any:
    return todist.inner_loop(
        lambda params: loss(params, meta), todist.sgd(lr=LR), start, steps, meta=meta, adjoint=adjoint
    )


def gradient(adjoint: Any, steps: int = 4) -> tuple[Tensor, ...]:
    """With respect to the start and to ``meta``; zeros where there is none."""
    start, meta = leaves()
    end = trained(start, meta, steps, adjoint).params
    return torch.autograd.grad((end**2).sum(), (start, meta), allow_unused=True, materialize_grads=True)


def expected(steps: int = 4, **how: Any) -> tuple[Tensor, ...]:
    start, meta = leaves()
    return torch.autograd.grad((unrolled(start, meta, steps, **how) ** 2).sum(), (start, meta))


@loops("inner_loop", "typing.InnerLoopResult", "Recorded", "Replayed")
def the_gradient_through_the_training() -> None:
    same(gradient(todist.Recorded()), expected())
    same(gradient(todist.Replayed()), expected())
    start, meta = leaves()
    for adjoint in (todist.Recorded(), todist.Replayed()):
        result = trained(start, meta, 4, adjoint)
        assert isinstance(result, todist.typing.InnerLoopResult)
        (grad,) = torch.autograd.grad((result.params**2).sum(), meta, create_graph=True)
        (plain,) = torch.autograd.grad((unrolled(start, meta, 4) ** 2).sum(), meta, create_graph=True)
        same(torch.autograd.grad(grad.sum(), meta), torch.autograd.grad(plain.sum(), meta))


@loops("Truncated", "FirstOrder", "Reptile")
def first_steps_and_first_order() -> None:
    start, meta = leaves()
    before = unrolled(start, meta, 2).detach().requires_grad_()
    (late,) = torch.autograd.grad((unrolled(before, meta, 2) ** 2).sum(), meta)
    of_start, of_meta = gradient(todist.Truncated(2))
    same(of_meta, late)
    same(of_start, 0 * of_start)
    end = unrolled(start, meta, 4).detach()
    same(gradient(todist.FirstOrder())[0], 2 * end)  # MAML's of first order: the gradient where the loop ends
    same(gradient(todist.Reptile())[0], start.detach() - end)


@loops("FiniteDifference", "SAMA", "Implicit")
def approximations() -> None:
    start, meta = leaves()
    before = unrolled(start, meta, 3).detach().requires_grad_()
    (late,) = torch.autograd.grad((unrolled(before, meta, 1) ** 2).sum(), meta)
    same(gradient(todist.FiniteDifference())[1], late, rtol=1e-4, atol=1e-6)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, found = gradient(todist.Implicit(), steps=300)
    end = unrolled(start, meta, 300).detach()
    hessian = A + 0.12 * (end**2).diag()
    same(found, torch.linalg.solve(hessian, 2 * end), rtol=1e-4, atol=1e-6)
    _, found = gradient(todist.SAMA(), steps=300)
    same(
        found, LR * 2 * end, rtol=1e-4, atol=0
    )  # the identity in place of the Hessian, and the optimizer's factor


@loops("EvolutionStrategies", "PersistentEvolutionStrategies")
def smoothed() -> None:
    for adjoint in (
        todist.EvolutionStrategies(samples=500, sigma=0.01),
        todist.PersistentEvolutionStrategies(samples=500, sigma=0.01, unroll=2),
    ):
        torch.manual_seed(0)
        same(gradient(adjoint)[1], expected()[1], rtol=0.3, atol=0)


@loops("adjoints.Adjoint")
def one_of_your_own() -> None:
    assert issubclass(todist.Recorded, todist.adjoints.Adjoint)
    with pytest.raises(TypeError, match="adjoint"):
        gradient("Recorded")


class Sines(TorchDispatchMode):
    """Counts them."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.sin.default
        return func(*args, **(kwargs or {}))


@loops("remat")
def computed_again() -> None:
    x = numbers(0.3, 1.2).requires_grad_()
    value = todist.remat(lambda x: ((x.sin() ** 2).exp().log()).sum())(x)
    (node,) = {edge for edge, _ in value.grad_fn.next_functions if edge is not None}
    assert node.variable is x  # one node of the graph, and the argument
    with Sines() as sines:
        (first,) = torch.autograd.grad(value, x, create_graph=True)
    assert sines.count
    with Sines() as sines:
        (second,) = torch.autograd.grad(first.sum(), x)
    assert sines.count
    same([first, second], [(2 * x).sin(), 2 * (2 * x).cos()])


# Modules.


@modules("module_clone", "extract_state_dict", "recover_state_dict", "stop_gradient", "nn.ModuleState")
def clones_and_snapshots() -> None:
    net = nn.Linear(2, 1, bias=False).double()
    net.register_forward_hook(lambda module, args, out: 2 * out)
    net.eval()
    clone = todist.module_clone(net)
    same(clone(numbers(1.0, 2.0)), net(numbers(1.0, 2.0)))
    assert not clone.training
    assert clone is not net

    start = clone.weight
    snapshot = todist.extract_state_dict(clone)
    assert isinstance(snapshot, todist.nn.ModuleState)
    inner = todist.MetaSGD(clone, lr=0.1)
    for _ in range(2):
        inner.step(clone(numbers(1.0, 2.0)).sum())
        assert not torch.equal(clone.weight, start)
        todist.recover_state_dict(clone, snapshot)
        assert torch.equal(clone.weight, start)
    inner.step(clone(numbers(1.0, 2.0)).sum())
    moved = clone.weight.detach().clone()
    todist.stop_gradient(clone)
    assert clone.weight.requires_grad
    assert clone.weight.grad_fn is None
    same(clone.weight.detach(), moved)


@modules("MetaGradientModule", "ImplicitMetaGradientModule", "ZeroOrderGradientModule")
def modules_of_two_kinds_of_parameters() -> None:
    class Ridge(todist.nn.ImplicitMetaGradientModule):
        def __init__(self, meta_net: nn.Module) -> None:
            super().__init__()
            self.meta_net = meta_net
            self.x = nn.Parameter(torch.zeros(2, dtype=torch.float64))

        def optimality(self) -> list[Tensor]:
            return [A @ self.x - self.meta_net.weight[0]]

        def solve(self) -> Any:
            with torch.no_grad():
                self.x.copy_(torch.linalg.solve(A, self.meta_net.weight[0]))
            return self

    net = nn.Linear(2, 1, bias=False).double()
    solved = Ridge(net)
    assert [name for name, _ in solved.named_parameters()] == ["x"]
    assert [name for name, _ in solved.named_meta_parameters()] == ["meta_net.weight"]
    solved.solve()
    (grad,) = torch.autograd.grad(solved.x.sum(), net.weight)
    same(grad[0], torch.linalg.inv(A).sum(0), rtol=1e-4, atol=0)
    assert issubclass(todist.nn.ImplicitMetaGradientModule, todist.nn.MetaGradientModule)

    class Estimated(
        todist.nn.ZeroOrderGradientModule,
        method="antithetic",
        num_samples=1,
        sigma=0.1,
    ):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(numbers(1.0, 2.0))

        def forward(self) -> Tensor:
            return (self.w.detach() * numbers(3.0, -4.0)).sum()

        def sample(self, shape: Any) -> Tensor:
            return numbers(0.5, -1.0).expand(shape)

    estimated = Estimated()
    estimated().backward()
    noise = numbers(0.5, -1.0)
    same(estimated.w.grad, (noise @ numbers(3.0, -4.0)) * noise)


@modules("Equilibrium")
def what_a_cell_does_not_change() -> None:
    weight = nn.Parameter(0.2 * A)

    def cell(z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(z @ weight + x)

    layer = todist.nn.Equilibrium(cell)
    x = numbers(0.4, -0.3)[None]
    z = layer(x)
    same(cell(z, x), z, rtol=1e-4, atol=1e-5)


@modules("reparametrize", "swap_state")
def other_tensors() -> None:
    net = nn.Linear(2, 1, bias=False).double()
    own, other = net.weight, torch.ones(1, 2, dtype=torch.float64)
    seen = []
    with pytest.raises(RuntimeError, match="shape"), todist.nn.reparametrize(net, {"weight": other}):
        seen.append(net.weight) or net(numbers(1.0))
    assert seen[0] is other
    assert net.weight is own
    old = todist.nn.swap_state(net, {"weight": other})
    assert net.weight is other
    todist.nn.swap_state(net, old)
    assert net.weight is own
