"""Gradients → gradients over the root of the sum of their squares."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from torchopt_dist.core.types import TensorTree
from torchopt_dist.ops import _foreach as foreach
from torchopt_dist.transform._elementwise import check_dense, elementwise, first_state
from torchopt_dist.transform._hyperparameters import HyperParameter, check_at_least_zero, check_start
from torchopt_dist.transform.base import GradientTransformation

__all__ = ["ScaleByRssState", "scale_by_rss"]


class ScaleByRssState(NamedTuple):
    """The state of :func:`scale_by_rss`; the name is that of ``torch.optim.Adagrad``."""

    sum: TensorTree
    """Sums of the squared gradients: a tensor for each parameter, of its shape and dtype."""


def scale_by_rss(
    initial_accumulator_value: float = 0.0, eps: HyperParameter = 1e-10, moment_requires_grad: bool = False
) -> GradientTransformation:
    """Adagrad's direction ``g / (sqrt(s) + eps)`` with ``s = s + g**2``, as in ``torch.optim.Adagrad``.

    [Duchi, Hazan and Singer 2011, Adaptive Subgradient Methods for Online Learning and Stochastic Optimization.]

    Args:
        initial_accumulator_value: the sum at the start, at least 0.
        eps: added to the root, at least 0; a number or a tensor of one element. The root's derivative at 0 is taken
            to be 0, which is the limit as the gradient goes to 0.
        moment_requires_grad: make the initial sums leaves that require grad.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of its range.
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
        partial(first_state, ScaleByRssState, moment_requires_grad, sum=initial_accumulator_value),
        partial(_formula, eps=eps),
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
