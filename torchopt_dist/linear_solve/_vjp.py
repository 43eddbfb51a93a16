"""A function of tensors, a point → its value there, and a function for products with the transposed Jacobian.

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

from torchopt_dist._torch_private import transforms_are_active

__all__ = ["Tensors", "pull", "refuse_forward_mode", "takes_duals", "vjp"]

Tensors: TypeAlias = list[Tensor]


def vjp(
    function: Callable[[Tensors], Sequence[Tensor]], primals: Sequence[Tensor]
) -> tuple[Tensors, Callable[[Sequence[Tensor]], Tensors]]:
    """Evaluate a function once, and return its value and its products with cotangents.

    Args:
        function: tensors → tensors.
        primals: the point at which to evaluate it; floating-point tensors.

    Returns:
        The values, and a function from cotangents, one for each value, to gradients, one for each primal. If grad mode
        is on now, the gradients are differentiable with regard to the primals and the cotangents.
    """
    if transforms_are_active():
        pulled: Any
        values, pulled = torch.func.vjp(lambda *points: tuple(function(list(points))), *primals)  # type: ignore[misc]
        return list(values), lambda cotangents: list(pulled(tuple(cotangents)))
    differentiable = torch.is_grad_enabled()
    with torch.enable_grad():
        # An alias of its own, so that a primal that depends on another one is differentiated as if it did not.
        points = [
            primal.view_as(primal)
            if differentiable and primal.requires_grad
            else primal.detach().requires_grad_()
            for primal in primals
        ]
        values = list(function(points))
    return values, lambda cotangents: pull(values, points, cotangents, differentiable)


def pull(
    values: Sequence[Tensor], points: Sequence[Tensor], cotangents: Sequence[Tensor], differentiable: bool
) -> Tensors:
    """Gradients of values with regard to points, zero where there is no path; the graph is kept."""
    connected = [(v, c) for v, c in zip(values, cotangents, strict=True) if v.requires_grad]
    if not connected or not points:
        return [torch.zeros_like(point) for point in points]
    outputs, weights = zip(*connected, strict=True)
    return list(
        torch.autograd.grad(
            outputs,
            points,
            weights,
            retain_graph=True,
            create_graph=differentiable,
            materialize_grads=True,
        )
    )


def takes_duals() -> bool:
    """Whether a level of forward-mode differentiation is open, by torch's public names."""
    zero = torch.zeros(())
    try:
        forward_ad.make_dual(zero, zero)
    except RuntimeError:
        return False
    return True


def refuse_forward_mode() -> NoReturn:
    """Raise the error of derivatives that only reverse mode has."""
    raise NotImplementedError(
        "linear solves and implicit gradients have no forward-mode derivative (torch.func.jvp and jacfwd, "
        "torch.autograd.forward_ad): use torch.func.vjp and jacrev, or torch.autograd.grad"
    )
