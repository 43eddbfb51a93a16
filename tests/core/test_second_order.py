"""What torch cannot differentiate twice is an error that says what to write instead, and is none at first order."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

import torchopt_dist as todist
from tests.core.cubes import Cube, CubeOfOperations
from tests.diff.adjoint_table import ALL
from tests.rows import each_row
from torchopt_dist.core.second_order import guarded, refuse_left_out

D = {"dtype": torch.float64}


def logged(backward: Any) -> Any:
    @functools.wraps(backward)
    def wrapper(*args: Any) -> Any:
        return backward(*args)

    return wrapper


class CubeForTransforms(torch.autograd.Function):
    """The same by ``setup_context``, with a mark under another decorator."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    @logged
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad


LAST: dict[str, Any] = {
    "in the middle": lambda cube: lambda x, w: (w * cube(x.tanh()) ** 2).sum(),
    "with a constant gradient": lambda cube: lambda x, w: cube(w * x).sum(),
    "at the start": lambda cube: lambda x, w: (w * cube(x)).sum(),
}
FIRST_ORDER = ["first order", "reptile", "finite difference", "SAMA", "evolution strategies"]


def by_loop(loss: Any, adjoint: Any) -> Any:
    def outer(x: Tensor, w: Tensor) -> Tensor:
        result = todist.inner_loop(
            lambda p: loss(p, w), todist.sgd(lr=0.1), x, 2, meta=w, adjoint=adjoint, seed=0
        )
        return result.params.sin().sum()

    return outer


class Held(nn.Module):
    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros_like(x))
        self._parameters["x"] = x


def by_steps(loss: Any) -> Any:
    def outer(x: Tensor, w: Tensor) -> Tensor:
        held = Held(x)
        optimizer = todist.MetaSGD(held, lr=0.1)
        for _ in range(2):
            optimizer.step(loss(held.x, w))
        return held.x.sin().sum()

    return outer


def leaves() -> tuple[Tensor, Tensor]:
    return torch.tensor([0.3, -0.8], **D, requires_grad=True), torch.tensor(
        [1.1, 0.7], **D, requires_grad=True
    )


@each_row("wanted", ["all", "x", "w"])
@each_row("function", [Cube, CubeForTransforms])
@each_row("name", LAST)
@each_row("way", ["recorded", "replayed", "replayed from snapshots", "truncated", "MetaSGD"])
@pytest.mark.filterwarnings("ignore:steps of an inner loop are recorded one by one")
def test_a_function_that_is_differentiable_once_is_refused(way, name, function, wanted):
    """Torch itself raises at most where the gradient of all leaves is asked for."""
    loss = LAST[name](function.apply)
    outer = by_steps(loss) if way == "MetaSGD" else by_loop(loss, ALL[way])
    x, w = leaves()
    value = outer(x, w)
    with pytest.raises(
        RuntimeError, match=rf"twice .* @once_differentiable, `{function.__name__}`.*first_order"
    ):
        value.backward() if wanted == "all" else torch.autograd.grad(value, x if wanted == "x" else w)


@each_row("name", LAST)
@each_row("order", [1, 2])
def test_an_implicit_gradient_is_refused(name, order):
    x, w = leaves()
    value = by_loop(LAST[name](Cube.apply), todist.Implicit(not_converged="ignore"))(x, w)
    with pytest.raises(
        RuntimeError, match="twice a function that was marked with @once_differentiable, `Cube`"
    ):
        torch.autograd.grad(value, w, create_graph=order == 2)


@each_row("name", LAST)
@each_row("way", ["recorded", "replayed from snapshots", "implicit"])
@pytest.mark.filterwarnings("ignore:steps of an inner loop are recorded one by one")
def test_a_function_of_operations_is_not(way, name):
    adjoint = (
        ALL[way]
        if way != "implicit"
        else todist.Implicit(todist.linear_solve.solve_normal_cg(ridge=1e-3), not_converged="ignore")
    )
    found = []
    for cube in (CubeOfOperations.apply, lambda x: x**3):
        x, w = leaves()
        value = by_loop(lambda x, w, cube=cube: LAST[name](cube)(x, w) + (x**2).sum(), adjoint)(x, w)
        found.append(torch.autograd.grad(value, w)[0])
    torch.testing.assert_close(*found)


@each_row("name", LAST)
@each_row("way", FIRST_ORDER)
@pytest.mark.filterwarnings("ignore:nothing gets a gradient", "ignore:`FirstOrder", "ignore:`Reptile")
def test_what_takes_no_second_derivative_is_as_with_operations(way, name):
    found = []
    for function in (Cube, CubeOfOperations):
        x, w = leaves()
        torch.manual_seed(0)
        value = by_loop(LAST[name](function.apply), ALL[way])(x, w)
        found.append(torch.autograd.grad(value, (x, w), allow_unused=True))
    torch.testing.assert_close(*found)
    assert any(one is not None for one in found[0])


@each_row("wanted", ["all", "w"])
@each_row("name", LAST)
@each_row("way", ["recorded", "replayed from snapshots", "MetaSGD"])
@pytest.mark.filterwarnings("ignore:steps of an inner loop are recorded one by one")
def test_in_vmap_too(way, name, wanted):
    loss = LAST[name](CubeForTransforms.apply)
    _, w = leaves()

    def task(x: Tensor) -> Tensor:
        return (by_steps(loss) if way == "MetaSGD" else by_loop(loss, ALL[way]))(x + 0 * w, w)

    value = torch.vmap(task)(torch.tensor([[0.3, -0.8], [0.5, 0.2]], **D)).sum()
    with pytest.raises(RuntimeError, match=r"twice .* @once_differentiable, `CubeForTransforms`"):
        value.backward() if wanted == "all" else torch.autograd.grad(value, w)


def test_first_derivatives_of_recorded_steps_are_right():
    """Also that of what only weighs the step: it does not go through the gradient."""
    x, w = leaves()
    lr = torch.tensor(0.1, **D, requires_grad=True)
    held = Held(x)
    todist.MetaSGD(held, lr=lr).step((w * Cube.apply(held.x)).sum())
    (found,) = torch.autograd.grad(held.x.sum(), lr, retain_graph=True)
    torch.testing.assert_close(found, -(w * 3 * x**2).sum().detach())
    with pytest.raises(RuntimeError, match="once_differentiable"):
        held.x.sum().backward()


def test_a_parameter_behind_which_there_is_none_keeps_its_second_derivative():
    """Its gradient goes once through the function, which is allowed."""
    x, w = leaves()
    held = Held(w)
    todist.MetaSGD(held, lr=0.1).step((held.x**3 * Cube.apply(x)).sum())
    (found,) = torch.autograd.grad(held.x.sum(), w)
    torch.testing.assert_close(found, 1 - 0.1 * 6 * w.detach() * x.detach() ** 3)


def test_gradients_without_such_a_function_are_themselves():
    x, w = leaves()
    loss = (w * x.sin()).sum()
    grads = torch.autograd.grad(loss, (x, w), create_graph=True)
    made = guarded(grads, (x, w), [loss.grad_fn, *(node for node, _ in loss.grad_fn.next_functions)])
    assert all(one is other for one, other in zip(made, grads, strict=True))
    refuse_left_out([*grads, x.detach(), x])


def test_a_graph_from_elsewhere_is_looked_through():
    """As a worker's, whose function may have taken a gradient without this package."""
    x, _ = leaves()
    (gradient,) = torch.autograd.grad((Cube.apply(x) ** 2).sum(), x, create_graph=True)
    value = (x * gradient.exp()).sum()
    torch.autograd.grad(value, x, retain_graph=True)  # torch says nothing
    with pytest.raises(
        RuntimeError, match="twice a function that was marked with @once_differentiable: a part"
    ):
        refuse_left_out([value])


@each_row("adjoint", [todist.Recorded(), todist.Replayed(), todist.Truncated(2)])
def test_a_loss_with_such_a_gradient_in_it_is_refused(adjoint):
    """Where torch leaves a part of the gradient of an inner step out, and says nothing."""
    x, w = leaves()

    def loss(p: Tensor, w: Tensor) -> Tensor:
        z = 1 * p
        (gradient,) = torch.autograd.grad((w * Cube.apply(z) ** 2).sum(), z, create_graph=True)
        return (gradient * p).sum()

    with pytest.raises(RuntimeError, match="once_differentiable: a part of the gradient would be missing"):
        torch.autograd.grad(by_loop(loss, adjoint)(x, w), w)


def _pairs(n: int) -> Tensor:
    return torch.triu_indices(n, n, 1)


Y = torch.tensor([1, 0, 2])
OPERATIONS: dict[str, tuple[Any, Any]] = {
    "torch.cdist": (
        lambda x: torch.cdist(x, x.detach().cos(), p=3),
        lambda x: torch.linalg.vector_norm(x.unsqueeze(-2) - x.detach().cos().unsqueeze(-3), 3, dim=-1),
    ),
    "F.pdist": (
        lambda x: F.pdist(x, p=3),
        lambda x: torch.linalg.vector_norm(x[_pairs(3)[0]] - x[_pairs(3)[1]], 3, dim=-1),
    ),
    "F.hardsigmoid": (F.hardsigmoid, lambda x: (x / 6 + 0.5).clamp(0, 1)),
    "F.embedding_bag": (
        lambda x: F.embedding_bag(torch.arange(9).reshape(3, 3), W, per_sample_weights=x, mode="sum"),
        lambda x: (F.embedding(torch.arange(9).reshape(3, 3), W) * x.unsqueeze(-1)).sum(-2),
    ),
    "F.multi_margin_loss": (
        lambda x: F.multi_margin_loss(x, Y, p=2),
        lambda x: (1 - x.gather(1, Y[:, None]) + x).clamp(min=0).pow(2).scatter(1, Y[:, None], 0).mean(),
    ),
    "F.multilabel_margin_loss": (
        lambda x: F.multilabel_margin_loss(x, torch.tensor([[1, -1, 0], [0, 2, -1], [2, -1, 0]])),
        lambda x: sum(
            (1 - x[n, j] + x[n, i]).clamp(min=0) / 9
            for n, targets in enumerate([{1}, {0, 2}, {2}])
            for j in targets
            for i in {0, 1, 2} - targets
        ),
    ),
    "torch.segment_reduce": (
        lambda x: torch.segment_reduce(x, "sum", lengths=torch.tensor([1, 2])),
        lambda x: torch.zeros(2, 3, **D).index_add(0, torch.tensor([0, 1, 1]), x),
    ),
    "F.ctc_loss": (
        lambda x: F.ctc_loss(x.log_softmax(-1)[:, None], Y[:1, None], (3,), (1,)),
        None,
    ),
}
W = torch.linspace(-1, 1, 18, **D).reshape(9, 2).sin()
if hasattr(F, "linear_cross_entropy"):  # torch 2.13
    OPERATIONS["F.linear_cross_entropy"] = (
        lambda x: F.linear_cross_entropy(
            x, W.reshape(6, 3), Y, options=nn.LinearCrossEntropyOptions(batch_chunk_size=2)
        ),
        lambda x: F.cross_entropy(F.linear(x, W.reshape(6, 3)), Y),
    )


def numbers() -> Tensor:
    return (3 * torch.linspace(-1, 2, 9, **D).reshape(3, 3).sin()).requires_grad_()


@each_row("name", OPERATIONS)
@each_row("way", ["recorded", "replayed from snapshots", "MetaSGD"])
@pytest.mark.filterwarnings("ignore:steps of an inner loop are recorded one by one")
def test_an_operation_without_a_second_derivative_says_what_to_write(way, name):
    operation, instead = OPERATIONS[name]

    def outer(operation: Any, first: Tensor) -> Tensor:
        def loss(x: Tensor, w: Tensor) -> Tensor:
            return (operation(w * x).sin() ** 2).sum()

        return (by_steps(loss) if way == "MetaSGD" else by_loop(loss, ALL[way]))(first, w)

    x, w = numbers(), torch.tensor(0.9, **D, requires_grad=True)
    with pytest.raises(RuntimeError, match=rf"{re.escape(name)} .*second derivative.*first_order=True"):
        torch.autograd.grad(outer(operation, x), w)
    todist.MetaSGD(Held(x), lr=0.1).step(operation(x).sum(), first_order=True)
    if instead is not None:
        torch.testing.assert_close(operation(x), instead(x))
        x = x.detach().requires_grad_()
        torch.autograd.grad(outer(instead, x), w)
