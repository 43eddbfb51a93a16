"""Gradients → the gradients made smaller where they are too large: by their norm, by entry, or beside parameters."""

from __future__ import annotations

import math
import numbers
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchopt_dist.ops import _foreach as foreach
from torchopt_dist.transform._elementwise import on_leaves
from torchopt_dist.transform._hyperparameters import HyperParameter, check_at_least_zero
from torchopt_dist.transform.base import GradientTransformation, of_elements, stateless

__all__ = ["adaptive_grad_clip", "clip_grad_norm", "clip_grad_value"]


def clip_grad_norm(
    max_norm: HyperParameter, norm_type: float | str = 2.0, error_if_nonfinite: bool = False
) -> GradientTransformation:
    """Scale all gradients by one factor, so that their norm is at most ``max_norm``.

    The factor is ``min(1, max_norm / (norm + 1e-6))``, as in ``torch.nn.utils.clip_grad_norm_``, and the norm is that
    of all gradients of one ``update`` in one vector: an :class:`~torchopt_dist.Optimizer` makes one for each parameter
    group, a :class:`~torchopt_dist.MetaOptimizer` for each module. Its derivative is part of the graph, to any order.
    Where a norm has no finite derivative (the norm of zeros; an entry of 0 under an order below 2), its derivative is
    taken to be 0; entries that share the largest or the smallest size get equal parts of the derivative.

    Args:
        max_norm: a number that is at least 0, or a tensor of one element, which may require grad.
        norm_type: the order of the norm: any number, ``math.inf`` (or ``'inf'``) for the largest entry, ``-math.inf``
            for the smallest, 0 for the number of entries that are not 0.
        error_if_nonfinite: raise an error where the norm is infinite or NaN. This reads the value, so it does not work
            in ``vmap`` and under ``torch.compile(fullgraph=True)``.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: ``max_norm`` is negative or a tensor of more than one element; ``norm_type`` is not an order.
        RuntimeError: from ``update``: the norm is not finite, and ``error_if_nonfinite`` is set.

    Example:
        >>> import torch
        >>> init, update = clip_grad_norm(1.0)
        >>> gradients = [torch.tensor([3.0]), torch.tensor([4.0])]
        >>> update(gradients, init(gradients))[0]
        [tensor([0.6000]), tensor([0.8000])]
    """
    check_at_least_zero("max_norm", max_norm)
    order = _order(norm_type)
    return GradientTransformation(stateless, partial(_norm_update, max_norm, order, bool(error_if_nonfinite)))


def clip_grad_value(clip_value: HyperParameter) -> GradientTransformation:
    """Clamp each entry to ``[-clip_value, clip_value]``, as ``torch.nn.utils.clip_grad_value_``.

    Complex numbers have no order: torch clamps none, and neither does this.

    Args:
        clip_value: a number that is at least 0, or a tensor of one element, which may require grad.

    Raises:
        TypeError: the argument has the wrong type.
        ValueError: it is negative, or a tensor of more than one element.
        RuntimeError: from ``update``: a gradient is complex.

    Example:
        >>> import torch
        >>> init, update = clip_grad_value(1.0)
        >>> gradient = torch.tensor([-3.0, 0.5])
        >>> update(gradient, init(gradient))[0]
        tensor([-1.0000,  0.5000])
    """
    check_at_least_zero("clip_value", clip_value)
    return GradientTransformation(stateless, partial(_value_update, clip_value))


def _order(norm_type: Any) -> float:
    if not isinstance(norm_type, (str, numbers.Real)):
        raise TypeError(f"`norm_type` must be a number or 'inf', got {type(norm_type).__name__}")
    try:
        order = float(norm_type)
    except ValueError:
        order = math.nan
    if math.isnan(order):
        raise ValueError(f"`norm_type` must be a number or 'inf', got {norm_type!r}")
    return order


@of_elements(norms=True)
@on_leaves()
def _norm_update(
    max_norm: HyperParameter, order: float, error_if_nonfinite: bool, grads: list[Tensor]
) -> list[Tensor]:
    measured = [grad for grad in grads if grad.numel() > 0]
    if not measured:
        return grads
    return foreach.multiply(grads, _factor(max_norm, _total_norm(measured, order, error_if_nonfinite)))


def _factor(max_norm: HyperParameter, norm: Tensor) -> Tensor:
    """``min(1, max_norm / (norm + 1e-6))``; where it is 1 no derivative passes, not even ``0 * inf``."""
    if isinstance(max_norm, Tensor):
        max_norm = max_norm.reshape(()).to(norm.device)
    norm = norm + 1e-6
    within = norm <= max_norm
    return torch.where(within, 1.0, max_norm / torch.where(within, 1.0, norm))


def _total_norm(grads: list[Tensor], order: float, error_if_nonfinite: bool) -> Tensor:
    """The norm of all gradients in one vector: torch's value, with a derivative that is finite everywhere.

    torch's own is NaN in the second order as soon as one gradient is all zeros.
    """
    values = [grad.detach() for grad in grads] if torch.is_grad_enabled() else grads
    sizes = [value.abs() if value.is_complex() else value for value in values]
    use_foreach = False if foreach.runs_in_a_loop(grads) else None
    value = torch.nn.utils.get_total_norm(sizes, order, error_if_nonfinite, use_foreach)
    if order == 0 or not torch.is_grad_enabled():
        return value
    usable = (value > 0) & value.isfinite()
    unit = torch.where(usable, value, 1.0)
    part = _extreme(grads, value, unit) if math.isinf(order) else _mean_size(grads, order, unit, usable)
    moving = value + value * (part - part.detach())
    return torch.where(usable, moving.to(value.dtype), value)


def _mean_size(grads: list[Tensor], order: float, unit: Tensor, usable: Tensor) -> Tensor:
    """``(sum |g / unit|^p)^(1/p)``, with the norm itself for a unit, so that no power overflows: it is 1."""
    sums = [_sum_of_powers(_at_least_single(grad) / unit.to(grad.device), order) for grad in grads]
    total = torch.stack([one.to(unit.device) for one in sums]).sum()
    return torch.where(usable, total, 1.0) ** (1 / order)


def _sum_of_powers(x: Tensor, order: float) -> Tensor:
    if order > 0 and order % 2 == 0:  # smooth at 0, in every order of derivative
        square = x.real.square() + x.imag.square() if x.is_complex() else x.square()
        return (square if order == 2 else square ** (order // 2)).sum()
    there = x != 0
    return torch.where(there, torch.where(there, x, 1.0).abs() ** order, 0.0).sum()


def _extreme(grads: list[Tensor], extreme: Tensor, unit: Tensor) -> Tensor:
    """The size, in units, of the entries that have the extreme size, as their mean: each gets an equal part."""
    sums, counts = [], []
    for grad in grads:
        x = _at_least_single(grad)
        attained = x.detach().abs() == extreme.to(x.device)
        size = torch.where(attained, torch.where(attained, x, 1.0).abs(), 0.0) / unit.to(x.device)
        sums.append(size.sum().to(unit.device))
        counts.append(attained.sum().to(unit.device))
    return torch.stack(sums).sum() / torch.stack(counts).sum()


def _at_least_single(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


@of_elements()
@on_leaves()
def _value_update(clip_value: HyperParameter, grads: list[Tensor]) -> list[Tensor]:
    if isinstance(clip_value, Tensor) or torch.is_grad_enabled() or foreach.runs_in_a_loop(grads):
        return [_clamp(grad, clip_value) for grad in grads]
    return list(torch._foreach_clamp_max(torch._foreach_clamp_min(grads, -clip_value), clip_value))


def _clamp(grad: Tensor, limit: HyperParameter) -> Tensor:
    if isinstance(limit, Tensor):
        limit = limit.reshape(()).to(grad.device)
        return grad.clamp(min=-limit, max=limit).to(grad.dtype)
    return grad.clamp(min=-limit, max=limit)


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
