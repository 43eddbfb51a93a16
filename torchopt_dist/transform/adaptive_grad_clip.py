"""Gradients, parameters → the gradients made smaller where they are large beside their parameters, output by output."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from torchopt_dist.transform._elementwise import on_leaves
from torchopt_dist.transform._hyperparameters import HyperParameter, check_at_least_zero
from torchopt_dist.transform.base import GradientTransformation, stateless

__all__ = ["adaptive_grad_clip"]

_LEAST_NORM = 1e-6


def adaptive_grad_clip(clipping: HyperParameter, eps: HyperParameter = 1e-3) -> GradientTransformation:
    """Scale the gradient of each output unit so that its norm is at most ``clipping`` times that of its parameters.

    A unit is what has one index of the first dimension, which in torch's layers is that of the outputs; a tensor of
    fewer than two dimensions is one unit. A gradient ``g`` of a unit ``p`` with ``|g| > m = clipping * max(|p|, eps)``
    becomes ``m g / max(|g|, 1e-6)``. [Brock et al. 2021, High-Performance Large-Scale Image Recognition Without
    Normalization, equation 3.] The derivative of a norm at 0 is taken to be 0.

    Args:
        clipping: a number that is at least 0, or a tensor of one element, which may require grad.
        eps: the smallest norm of a unit's parameters that counts, so that zeros can be trained; the same.

    Raises:
        TypeError: an argument has the wrong type; from ``update``: a gradient is sparse.
        ValueError: an argument is negative, or a tensor of more than one element; from ``update``: ``params`` are
            missing, or their structure differs.

    Example:
        >>> import torch
        >>> w = torch.tensor([[3.0, 4.0], [0.0, 1.0]])
        >>> init, update = adaptive_grad_clip(0.1)
        >>> update(torch.tensor([[0.0, 2.0], [0.01, 0.0]]), init(w), params=w)[0]
        tensor([[0.0000, 0.5000],
                [0.0100, 0.0000]])
    """
    check_at_least_zero("clipping", clipping)
    check_at_least_zero("eps", eps)
    return GradientTransformation(stateless, partial(_update, clipping, eps))


@on_leaves(params="clipping is relative to the parameters")
def _update(
    clipping: HyperParameter, eps: HyperParameter, params: list[Tensor], grads: list[Tensor]
) -> list[Tensor]:
    return [_clipped(g, p, clipping, eps) for g, p in zip(grads, params, strict=True)]


def _clipped(grad: Tensor, param: Tensor, clipping: HyperParameter, eps: HyperParameter) -> Tensor:
    if not grad.numel():
        return grad
    size, of_param = _norms(grad), _norms(param)
    least = torch.as_tensor(eps, dtype=of_param.dtype, device=of_param.device).reshape(())
    factor = clipping.reshape(()).to(size.device) if isinstance(clipping, Tensor) else clipping
    most = factor * torch.maximum(of_param, least)
    within = size <= most
    ratio = torch.where(within, 1.0, most / torch.where(within, 1.0, size.clamp(min=_LEAST_NORM)))
    return (grad * ratio).to(grad.dtype)


def _norms(x: Tensor) -> Tensor:
    """The norm of each unit, of a shape that broadcasts; in float32 for half precision, with a derivative of 0 at 0."""
    square = x.real.square() + x.imag.square() if x.is_complex() else x.square()
    if x.dtype in (torch.float16, torch.bfloat16):
        square = x.float().square()
    total = square.sum(dim=tuple(range(1, x.ndim)), keepdim=True) if x.ndim > 1 else square.sum()
    there = total > 0
    return torch.where(there, torch.where(there, total, 1.0).sqrt(), 0.0)
