"""Tensors or a function of tensors, gradients of what comes out → gradients of what goes in.

Outside of ``torch.func`` this is torch's own graph and ``torch.autograd.grad``, so that the function may call
``autograd.grad`` itself, or workers: it runs once, and each product is one backward pass. Inside a ``torch.func``
transform it is ``torch.func.vjp``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge, get_gradient_edge

from torchopt_dist.core.types import OptionalTensor
from torchopt_dist.torch_private import forward_mode_is_active, grad_of_edges, transforms_are_active

__all__ = [
    "Tensors",
    "edges",
    "has_derivative",
    "leaf_like",
    "may_be_differentiated",
    "plus",
    "pull",
    "pulled_back",
    "refuse_forward_mode",
    "takes_duals",
    "vjp",
]

Tensors: TypeAlias = list[Tensor]


def vjp(
    function: Callable[[Tensors], Sequence[Tensor]],
    primals: Sequence[Tensor],
    *,
    once: bool = False,
    zeros: bool = True,
    wanted: Sequence[bool] | None = None,
) -> tuple[Tensors, Callable[[Sequence[Tensor]], list[Any]]]:
    """Evaluate a function once, and return its value and its products with cotangents.

    Args:
        function: tensors → tensors.
        primals: the point at which to evaluate it; floating-point tensors.
        once: whether one product is asked for, whose graph is then let go of.
        zeros: whether a primal that is not used has zeros for a gradient; outside of ``torch.func`` it can be ``None``.
        wanted: which primals get gradients, if not all; for the others the function gives ``None``.

    Returns:
        The values, and a function from cotangents, one for each value, to gradients, one for each primal. If grad mode
        is on now, the gradients are differentiable with regard to the primals and the cotangents.
    """
    if wanted is not None:
        some = [primal for primal, is_wanted in zip(primals, wanted, strict=True) if is_wanted]
        values, pull_some = vjp(
            lambda points: function(_mixed(points, primals, wanted)), some, once=once, zeros=zeros
        )
        return values, lambda cotangents: _mixed(pull_some(cotangents), [None] * len(primals), wanted)
    if transforms_are_active():
        pulled: Any
        values, pulled = torch.func.vjp(lambda *points: tuple(function(list(points))), *primals)  # type: ignore[misc]
        return list(values), lambda cotangents: list(pulled(tuple(cotangents)))
    differentiable = torch.is_grad_enabled()
    with torch.enable_grad():
        # An alias of its own, so that a primal that depends on another one is differentiated as if it did not. Of what
        # is left of a transform that has ended, only the alias says whether it requires grad.
        aliases = [primal.view_as(primal) if differentiable else primal.detach() for primal in primals]
        points = [alias if alias.requires_grad else alias.detach().requires_grad_() for alias in aliases]
        values = list(function(points))
    keep = None if once else True
    if not zeros:
        return values, lambda cotangents: pulled_back(
            values, cotangents, points, create_graph=differentiable, retain_graph=keep
        )
    return values, lambda cotangents: pull(values, points, cotangents, differentiable, retain_graph=keep)


def _mixed(some: Sequence[Any], others: Sequence[Any], wanted: Sequence[bool]) -> list[Any]:
    """The others, with some in the places of those that are wanted."""
    following = iter(some)
    return [next(following) if is_wanted else other for other, is_wanted in zip(others, wanted, strict=True)]


def pull(
    values: Sequence[Tensor],
    points: Sequence[Tensor],
    cotangents: Sequence[Tensor],
    differentiable: bool,
    *,
    retain_graph: bool | None = True,
) -> Tensors:
    """As :func:`pulled_back`, with zeros for a point that is not used; the graph is kept, unless said otherwise."""
    found = pulled_back(values, cotangents, points, create_graph=differentiable, retain_graph=retain_graph)
    return [
        torch.zeros_like(point, requires_grad=differentiable) if grad is None else grad
        for point, grad in zip(points, found, strict=True)
    ]


def edges(tensors: Sequence[Tensor]) -> list[GradientEdge | None]:
    """Where the graphs of tensors end, ``None`` for one that has none; the tensors themselves may then be freed."""
    return [get_gradient_edge(x) if x.requires_grad else None for x in tensors]


def pulled_back(
    outputs: Sequence[OptionalTensor] | Sequence[GradientEdge | None],
    bars: Sequence[OptionalTensor],
    inputs: Sequence[Tensor],
    *,
    create_graph: bool = False,
    retain_graph: bool | None = None,
) -> list[OptionalTensor]:
    """Gradients of outputs, ``None`` for zero → gradients of inputs, ``None`` for one that is not used.

    An output that is ``None``, or that has no graph, is left out. The graphs are as with ``torch.autograd.grad``. An
    output may be an edge, see :func:`edges`.
    """
    pairs = [
        (x, bar)
        for x, bar in zip(outputs, bars, strict=True)
        if x is not None and bar is not None and (isinstance(x, GradientEdge) or x.requires_grad)
    ]
    if not pairs or not inputs:
        return [None] * len(inputs)
    values, weights = zip(*pairs, strict=True)
    if all(isinstance(x, GradientEdge) for x in values):
        found = grad_of_edges(values, inputs, weights, create_graph=create_graph, retain_graph=retain_graph)
        return list(found)
    return list(
        torch.autograd.grad(
            values, inputs, weights, create_graph=create_graph, retain_graph=retain_graph, allow_unused=True
        )
    )


def plus(one: OptionalTensor, other: OptionalTensor) -> OptionalTensor:
    """The sum of tensors that may be missing."""
    if one is None or other is None:
        return other if one is None else one
    return one + other


def takes_duals() -> bool:
    """Whether a level of forward-mode differentiation is open, also by torch's public names."""
    if not forward_mode_is_active():
        return False
    zero = torch.zeros(())
    try:
        forward_ad.make_dual(zero, zero)
    except RuntimeError:
        return False
    return True


def leaf_like(tensor: Tensor) -> Tensor:
    """A new leaf with a tensor's values."""
    return tensor.detach().requires_grad_()


def has_derivative(leaf: Any) -> bool:
    """Whether a leaf is a tensor of real or complex numbers."""
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def may_be_differentiated() -> bool:
    """Whether what a backward pass computes here is recorded, or is inside of transforms, which do not say so."""
    return torch.is_grad_enabled() or transforms_are_active()


def refuse_forward_mode() -> NoReturn:
    """Raise the error of derivatives that only reverse mode has."""
    raise NotImplementedError(
        "linear solves and implicit gradients have no forward-mode derivative (torch.func.jvp and jacfwd, "
        "torch.autograd.forward_ad): use torch.func.vjp and jacrev, or torch.autograd.grad"
    )
