"""Gradients → gradients over the root of the sum of their squares."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from torch import Tensor

from torchopt_dist.ops import _foreach as foreach
from torchopt_dist.transform._elementwise import elementwise, filled
from torchopt_dist.transform._hyperparameters import HyperParameter, check_at_least_zero, check_start
from torchopt_dist.transform.base import GradientTransformation
from torchopt_dist.typing import Params, TensorTree

__all__ = ["ScaleByRssState", "scale_by_rss"]


class ScaleByRssState(NamedTuple):
    """What :func:`scale_by_rss` remembers; the name is that of ``torch.optim.Adagrad``."""

    sum: TensorTree
    """Sums of the squared gradients: a tensor a parameter, of its shape and dtype."""


def scale_by_rss(
    initial_accumulator_value: float = 0.0, eps: HyperParameter = 1e-10, moment_requires_grad: bool = False
) -> GradientTransformation:
    """Adagrad's direction ``g / (sqrt(s) + eps)`` with ``s = s + g**2``, as in ``torch.optim.Adagrad``.

    [Duchi, Hazan and Singer 2011, Adaptive Subgradient Methods for Online Learning and Stochastic Optimization.]

    Args:
        initial_accumulator_value: the sum at the start, at least 0.
        eps: added to the root, at least 0; a number or a tensor of one element. The root's derivative at 0 is taken
            to be 0, which is the limit as the gradient goes to 0.
        moment_requires_grad: the first sums are leaves that require grad.

    Raises:
        TypeError: an argument is of another type.
        ValueError: one is out of its range.

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
        partial(_init, initial_accumulator_value, moment_requires_grad),
        partial(_formula, eps=eps),
    )


def _init(value: float, requires_grad: bool, params: Params, /) -> ScaleByRssState:
    return ScaleByRssState(filled(params, value, requires_grad=requires_grad))


def _formula(
    grads: list[Tensor], sums: list[Tensor], *, eps: HyperParameter, inplace: bool
) -> tuple[list[Tensor], ...]:
    sums = foreach.add_product(sums, grads, grads, inplace=inplace)
    return foreach.divide(grads, foreach.add_number(foreach.square_root(sums), eps)), sums
