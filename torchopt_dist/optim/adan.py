"""Gradients → updates by Adan, as a function and as two classes."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import nn

from torchopt_dist import pytree
from torchopt_dist.arguments.options import hinted
from torchopt_dist.core.types import Numeric, ScalarOrSchedule, Schedule
from torchopt_dist.optim._signatures import arguments_of
from torchopt_dist.optim.meta_optimizer import MetaOptimizer
from torchopt_dist.optim.optimizer import Optimizer
from torchopt_dist.transform._hyperparameters import (
    HyperParameter,
    check_at_least_zero,
    check_decays,
    check_learning_rate,
    check_said,
    is_per_leaf,
    is_zero,
    plain_rates,
)
from torchopt_dist.transform.add_decayed_weights import add_decayed_weights, penalized
from torchopt_dist.transform.base import GradientTransformation, chain
from torchopt_dist.transform.scale import scale, scale_by_learning_rate, scale_by_schedule
from torchopt_dist.transform.scale_by_adan import scale_by_adan

__all__ = ["Adan", "MetaAdan", "adan"]


@hinted
def adan(
    lr: ScalarOrSchedule = 1e-3,
    betas: tuple[HyperParameter, HyperParameter, HyperParameter] = (0.98, 0.92, 0.99),
    eps: HyperParameter = 1e-8,
    weight_decay: HyperParameter = 0.0,
    *,
    moment_requires_grad: bool = False,
    maximize: bool = False,
) -> GradientTransformation:
    """Adan: ``(p - lr * d) / (1 + lr * weight_decay)``.

    ``d`` is the direction of :func:`~torchopt_dist.transform.scale_by_adan`.

    [Xie et al. 2024, Adan: Adaptive Nesterov Momentum Algorithm for Faster Optimizing Deep Models, algorithm 1.]

    Args:
        lr: learning rate: a number that is at least 0, a tensor of one element, a schedule (the number of steps
            made so far → a learning rate), or a tree of numbers and tensors, one for each parameter.
        betas: decays of the running averages of the gradients, of their changes, and of the squares of the gradients
            that look ahead, at least 0 and below 1; numbers or tensors of one element.
        eps: added to the denominator, at least 0; a number or a tensor of one element.
        weight_decay: decoupled and proximal, at least 0; a number or a tensor of one element.
        moment_requires_grad: make the initial averages leaves that require grad.
        maximize: maximize the objective.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a number is out of its range, or a tensor has more than one element.

    Example:
        >>> import torch
        >>> w = torch.tensor([1.0, -2.0])
        >>> impl = adan(lr=0.1)
        >>> impl.update(2 * w, impl.init(w), params=w)[0]
        tensor([-0.1000,  0.1000])
    """
    check_decays("betas", betas, 3)
    check_learning_rate("lr", lr)
    check_at_least_zero("weight_decay", weight_decay)
    # (p - lr * d) / (1 + lr * w) is p less lr / (1 + lr * w) times d + w * p.
    if is_zero(weight_decay):
        last = scale_by_learning_rate(lr)
    elif is_per_leaf(lr):
        last = scale_by_learning_rate(_shrunk(lr, weight_decay))
    elif callable(lr):
        last = scale_by_schedule(partial(_factor_of_schedule, lr, weight_decay))
    else:
        last = scale(_factor(lr, weight_decay))
    return chain(
        *penalized(0.0, maximize),
        scale_by_adan(*betas, eps, moment_requires_grad),
        add_decayed_weights(weight_decay),
        last,
    )


def _shrunk(rates: Any, weight_decay: HyperParameter) -> Any:
    return pytree.tree_map(lambda lr: -_factor(lr, weight_decay), plain_rates(rates))


def _factor(lr: Numeric, weight_decay: HyperParameter) -> Numeric:
    return -lr / (1 + lr * weight_decay)


def _factor_of_schedule(lr: Schedule, weight_decay: HyperParameter, count: Numeric) -> Numeric:
    return _factor(check_said("lr", lr(count)), weight_decay)


class Adan(Optimizer, transformation=adan):
    """Adan in place."""

    @arguments_of(adan)
    def __init__(self, params: Iterable[Any], *args: Any, **kwargs: Any) -> None:
        super().__init__(params, *args, **kwargs)


class MetaAdan(MetaOptimizer, transformation=adan, moment_requires_grad=True):
    """Adan that one can differentiate through."""

    @arguments_of(adan)
    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(module, *args, **kwargs)
