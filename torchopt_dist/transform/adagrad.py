"""Gradients → updates by Adagrad: gradients over the root of the sum of their squares."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from torchopt_dist.core.types import ScalarOrSchedule, TensorTree
from torchopt_dist.ops import _bias_correction as bias_correction
from torchopt_dist.ops import _foreach as foreach
from torchopt_dist.transform._elementwise import check_dense, elementwise
from torchopt_dist.transform._hyperparameters import HyperParameter, check_at_least_zero, check_start
from torchopt_dist.transform._texts import documented
from torchopt_dist.transform.add_decayed_weights import penalized
from torchopt_dist.transform.base import GradientTransformation, chain
from torchopt_dist.transform.scale import scale_by_learning_rate

__all__ = ["ScaleByRssState", "adagrad", "scale_by_rss"]


class ScaleByRssState(NamedTuple):
    """The state of :func:`scale_by_rss`; the name is that of ``torch.optim.Adagrad``."""

    sum: TensorTree
    """Sums of the squared gradients: a tensor for each parameter, of its shape and dtype."""


@documented
def scale_by_rss(
    initial_accumulator_value: float = 0.0, eps: HyperParameter = 1e-10, moment_requires_grad: bool = False
) -> GradientTransformation:
    """Adagrad's direction ``g / (sqrt(s) + eps)`` with ``s = s + g**2``, as in ``torch.optim.Adagrad``.

    [Duchi, Hazan and Singer 2011, Adaptive Subgradient Methods for Online Learning and Stochastic Optimization.]

    Args:
        initial_accumulator_value: the sum at the start, at least 0.
        eps: added to the root.
        moment_requires_grad: leaves at the start.

    Raises:
        TypeError: from ``update``: a gradient is sparse, where a graph may be recorded. Under ``torch.no_grad`` the
            direction of a sparse gradient is sparse, too.

    Example:
        >>> import torch
        >>> w = torch.tensor([1.0, -2.0])
        >>> impl = scale_by_rss()
        >>> impl.update(2 * w, impl.init(w), params=w)[0]
        tensor([ 1., -1.])
    """
    check_start("initial_accumulator_value", initial_accumulator_value)
    check_at_least_zero("eps", eps)
    return elementwise(
        ScaleByRssState,
        partial(_formula, eps=eps),
        moment_requires_grad,
        sum=initial_accumulator_value,
        sparse=True,
    )


def _formula(
    grads: list[Tensor], sums: list[Tensor], *, eps: HyperParameter, inplace: bool
) -> tuple[list[Tensor], ...]:
    if any(grad.is_sparse for grad in grads):
        return _with_sparse(grads, sums, eps=eps, inplace=inplace)
    check_dense(grads)
    sums = foreach.add_product(sums, grads, grads, inplace=inplace)
    return foreach.divide(grads, foreach.add_number(foreach.square_root(sums), eps)), sums


def _with_sparse(
    grads: list[Tensor], sums: list[Tensor], *, eps: HyperParameter, inplace: bool
) -> tuple[list[Tensor], ...]:
    if torch.is_grad_enabled():
        check_dense(grads)  # a graph through sparse tensors would be without some derivatives
    directions, after = [], []
    for grad, before in zip(grads, sums, strict=True):
        if grad.is_sparse:
            direction, new = _sparse(grad.coalesce(), before, eps, inplace=inplace)
        else:
            (direction,), (new,) = _formula([grad], [before], eps=eps, inplace=inplace)
        directions.append(direction)
        after.append(new)
    return directions, after


def _sparse(grad: Tensor, before: Tensor, eps: HyperParameter, *, inplace: bool) -> tuple[Tensor, Tensor]:
    """Only the rows that have a gradient are read and written; a sum of squares needs each row once."""

    def with_values(values: Tensor) -> Tensor:
        return torch.sparse_coo_tensor(
            grad.indices(), values, grad.shape, is_coalesced=True, check_invariants=False
        )

    squares = with_values(grad.values().square())
    after = before.add_(squares) if inplace else before + squares
    below = after.sparse_mask(grad).values().sqrt() + eps
    return with_values(grad.values() / below), after


class DecayState(NamedTuple):
    """The state of the decay of the learning rate."""

    step: TensorTree
    """How many gradients each parameter has had: a 0-d float32 tensor each, on the CPU."""


@documented
def adagrad(
    lr: ScalarOrSchedule = 1e-2,
    lr_decay: HyperParameter = 0.0,
    weight_decay: HyperParameter = 0.0,
    initial_accumulator_value: float = 0.0,
    eps: HyperParameter = 1e-10,
    *,
    moment_requires_grad: bool = False,
    maximize: bool = False,
) -> GradientTransformation:
    """Adagrad, as ``torch.optim.Adagrad``.

    :func:`~torchopt_dist.transform.scale_by_rss`, times ``lr / (1 + (t - 1) * lr_decay)`` at a parameter's gradient
    ``t``. [Duchi, Hazan and Singer 2011, Adaptive Subgradient Methods for Online Learning and Stochastic
    Optimization.]

    Args:
        lr: learning rate.
        lr_decay: how fast the learning rate falls, at least 0; a number or a tensor of one element.
        weight_decay: L2 penalty.
        initial_accumulator_value: the sum of the squared gradients at the start, at least 0.
        eps: added to the denominator.
        moment_requires_grad: leaves at the start.
        maximize: maximize the objective.

    Example:
        >>> import torch
        >>> w = torch.tensor([1.0, -2.0])
        >>> impl = adagrad(lr=0.1)
        >>> impl.update(2 * w, impl.init(w), params=w)[0]
        tensor([-0.1000,  0.1000])
    """
    check_at_least_zero("lr_decay", lr_decay)
    return chain(
        *penalized(weight_decay, maximize),
        scale_by_rss(initial_accumulator_value, eps, moment_requires_grad),
        elementwise(DecayState, partial(_decay, lr_decay=lr_decay), sparse=True),
        scale_by_learning_rate(lr),
    )


def _decay(
    updates: list[Tensor], steps: list[Tensor], *, lr_decay: HyperParameter, inplace: bool
) -> tuple[list[Tensor], ...]:
    factor = foreach.combine(partial(_factor, lr_decay), bias_correction.values(steps))
    return foreach.multiply(updates, factor), foreach.add_number(steps, 1, inplace=inplace)


def _factor(lr_decay: HyperParameter, before: HyperParameter) -> HyperParameter:
    return 1 / (1 + before * lr_decay)
