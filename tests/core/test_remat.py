"""One node that computes its function again: derivatives of every order, in autograd and in ``torch.func``."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

from tests.core.cubes import Cube
from tests.rows import each_row
from torchopt_dist.core.remat import apply

Fn = Callable[..., Any]


def pair(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return torch.tanh(a @ b).sum(-1), a.pow(2).sum()


def again(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    return apply(pair, a, b)


def loss_of(function: Fn) -> Fn:
    return lambda a, b: sum(x.sin().sum() for x in function(a, b))


def points() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(3, 4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)


def third(f: Fn, a: Tensor, b: Tensor) -> Tensor:
    a, b = a.clone().requires_grad_(), b.clone().requires_grad_()
    (g,) = torch.autograd.grad(loss_of(f)(a, b), b, create_graph=True)
    (h,) = torch.autograd.grad(g.pow(3).sum(), a, create_graph=True)
    return torch.autograd.grad(h.sin().sum(), b)[0]


def outside_of_vmap(f: Fn, a: Tensor, b: Tensor) -> Tensor:
    b = b.clone().requires_grad_()
    made = vmap(grad(loss_of(f), 1), (0, None))(torch.stack([a, 2 * a]), b)
    return torch.autograd.grad(made.pow(2).sum(), b)[0]


def many_gradients(f: Fn, a: Tensor, b: Tensor) -> Tensor:
    b = b.clone().requires_grad_()
    (g,) = torch.autograd.grad(loss_of(f)(a, b), b, create_graph=True)
    return torch.autograd.grad(g, b, torch.eye(16).double().view(16, 4, 4), is_grads_batched=True)[0]


def forward_over_reverse(f: Fn, a: Tensor, b: Tensor) -> Tensor:
    b = b.clone().requires_grad_()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(b, torch.ones_like(b))
        (g,) = torch.autograd.grad(loss_of(f)(a, dual), dual, create_graph=True)
        tangent = forward_ad.unpack_dual(g).tangent
        return torch.autograd.grad(tangent.pow(2).sum(), b)[0]


def twice(f: Fn) -> Fn:
    return grad(lambda a, b: grad(loss_of(f), 1)(a, b).pow(3).sum())


WAYS: dict[str, Fn] = {
    "grad": lambda f, a, b: grad(loss_of(f), 1)(a, b),
    "grad of grad": lambda f, a, b: twice(f)(a, b),
    "vmap": lambda f, a, b: vmap(loss_of(f), (0, None))(torch.stack([a, 2 * a]), b),
    "vmap of grad of grad": lambda f, a, b: vmap(twice(f), (0, None))(torch.stack([a, 2 * a]), b),
    "vmap of vmap": lambda f, a, b: vmap(vmap(twice(f), (0, None)), (None, 0))(
        torch.stack([a, 2 * a]), torch.stack([b, b.T])
    ),
    "jvp": lambda f, a, b: jvp(loss_of(f), (a, b), (a, b))[1],
    "grad of jvp": lambda f, a, b: grad(lambda a: jvp(loss_of(f), (a, b), (a, b))[1])(a),
    "jacfwd of jacfwd": lambda f, a, b: jacfwd(jacfwd(loss_of(f), 1), 1)(a, b),
    "jacrev": lambda f, a, b: jacrev(jacrev(loss_of(f), 1))(a, b),
    "hessian": lambda f, a, b: hessian(loss_of(f), 1)(a, b),
    "autograd to order 3": third,
    "autograd of vmap of grad": outside_of_vmap,
    "many gradients at a time": many_gradients,
    "forward_ad": forward_over_reverse,
}


@each_row("way", WAYS)
def test_derivatives_are_those_of_the_function(way: str) -> None:
    torch.testing.assert_close(WAYS[way](again, *points()), WAYS[way](pair, *points()))


def test_gradcheck() -> None:
    a, b = (x.requires_grad_() for x in points())
    assert torch.autograd.gradcheck(again, (a, b), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(again, (a, b))


def test_no_graph_is_kept_at_any_order() -> None:
    a, b = (x.requires_grad_() for x in points())
    made: list[weakref.ref[Tensor]] = []

    def function(a: Tensor, b: Tensor) -> tuple[Tensor]:
        inner = torch.tanh(a @ b)
        made.append(weakref.ref(inner))
        return (inner.pow(2).sum(),)

    def alive() -> int:
        return sum(one() is not None for one in made)

    (value,) = apply(function, a, b)
    (first,) = torch.autograd.grad(value, b, create_graph=True)
    (second,) = torch.autograd.grad(first.pow(2).sum(), b, create_graph=True)
    assert (len(made), alive()) == (3, 0)
    torch.autograd.grad(second.sum(), b)
    assert (len(made), alive()) == (5, 0)  # `second` depends on `first`, which is differentiated, too
    (recorded,) = function(a, b)
    assert recorded.requires_grad
    assert alive() == 1  # a graph is seen here


def test_integers_and_values_without_a_gradient() -> None:
    a, b = points()
    a.requires_grad_()
    index = torch.tensor([2, 0])

    def function(a: Tensor, b: Tensor, index: Tensor) -> tuple[Tensor, ...]:
        return a[index] @ b, index + 1, a.detach() * 2, a > 0

    made = apply(function, a, b, index)
    assert [x.requires_grad for x in made] == [True, False, True, False]
    (expected,) = torch.autograd.grad((a[index] @ b).sum(), a)
    torch.testing.assert_close(torch.autograd.grad(made[0].sum(), a, retain_graph=True)[0], expected)
    assert list(torch.autograd.grad(made[2].sum(), a, allow_unused=True)) == [None]
    assert torch.equal(made[1], index + 1)


def test_an_argument_that_depends_on_another_one() -> None:
    _, b = (x.requires_grad_() for x in points())
    (value,) = apply(lambda a, b: ((a * b).sum(),), b * 2, b)
    (first,) = torch.autograd.grad(value, b, create_graph=True)
    torch.testing.assert_close(first, 4 * b)
    torch.testing.assert_close(torch.autograd.grad(first.sum(), b)[0], torch.full_like(b, 4))


def test_a_refused_second_derivative_is_an_error() -> None:
    a, _ = (x.requires_grad_() for x in points())
    (value,) = apply(lambda a: (Cube.apply(a * 2).sum(),), a)
    (first,) = torch.autograd.grad(value, a, create_graph=True)
    torch.testing.assert_close(first, 24 * a**2)
    with pytest.raises(RuntimeError, match=r"Cube.*a part of the gradient would be missing"):
        torch.autograd.grad(first.sum(), a)


def test_arguments_are_kept_as_saved_tensors() -> None:
    a, b = (x.requires_grad_() for x in points())
    packed: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        packed.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        again(a, b)
    assert [id(x) for x in packed] == [id(a), id(b)]


def test_an_argument_that_was_changed_in_place_is_torchs_error() -> None:
    a, b = (x.requires_grad_() for x in points())
    value, _ = again(a, b)
    with torch.no_grad():
        a.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(value.sum(), a)
