"""Gradients → updates by Adagrad, as a function and as two classes."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from torchopt_dist.arguments.options import hinted
from torchopt_dist.core.types import Params, ScalarOrSchedule, TensorTree
from torchopt_dist.ops import _bias_correction as bias_correction
from torchopt_dist.ops import _foreach as foreach
from torchopt_dist.optim._signatures import arguments_of
from torchopt_dist.optim.meta_optimizer import MetaOptimizer
from torchopt_dist.optim.optimizer import Optimizer
from torchopt_dist.transform._elementwise import counts, elementwise
from torchopt_dist.transform._hyperparameters import HyperParameter, check_at_least_zero
from torchopt_dist.transform.add_decayed_weights import penalized
from torchopt_dist.transform.base import GradientTransformation, chain
from torchopt_dist.transform.scale import scale_by_learning_rate
from torchopt_dist.transform.scale_by_rss import scale_by_rss

__all__ = ["Adagrad", "MetaAdagrad", "adagrad"]


class DecayState(NamedTuple):
    """The state of the decay of the learning rate."""

    step: TensorTree
    """How many gradients each parameter has had: a 0-d float32 tensor each, on the CPU."""


@hinted
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
        lr: learning rate: a number that is at least 0, a tensor of one element, a schedule (the number of steps
            made so far → a learning rate), or a tree of numbers and tensors, one for each parameter.
        lr_decay: how fast the learning rate falls, at least 0; a number or a tensor of one element.
        weight_decay: how much of a parameter is added to its gradient (L2 penalty), at least 0; a number or a tensor of
            one element.
        initial_accumulator_value: the sum of the squared gradients at the start, at least 0.
        eps: added to the denominator, at least 0; a number or a tensor of one element.
        moment_requires_grad: make the initial sums leaves that require grad.
        maximize: maximize the objective.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a number is out of its range, or a tensor has more than one element.

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
        elementwise(DecayState, _init, partial(_decay, lr_decay=lr_decay), sparse=True),
        scale_by_learning_rate(lr),
    )


def _init(params: Params, /) -> DecayState:
    return DecayState(counts(params))


def _decay(
    updates: list[Tensor], steps: list[Tensor], *, lr_decay: HyperParameter, inplace: bool
) -> tuple[list[Tensor], ...]:
    factor = foreach.combine(partial(_factor, lr_decay), bias_correction.values(steps))
    return foreach.multiply(updates, factor), foreach.add_number(steps, 1, inplace=inplace)


def _factor(lr_decay: HyperParameter, before: HyperParameter) -> HyperParameter:
    return 1 / (1 + before * lr_decay)


class Adagrad(Optimizer, transformation=adagrad):
    """Adagrad in place, as ``torch.optim.Adagrad``.

    It takes sparse gradients, such as those of ``torch.nn.Embedding(sparse=True)``, if there is no ``weight_decay``,
    and changes only the rows that they have.
    """

    @arguments_of(adagrad)
    def __init__(self, params: Iterable[Any], *args: Any, **kwargs: Any) -> None:
        super().__init__(params, *args, **kwargs)


class MetaAdagrad(MetaOptimizer, transformation=adagrad):
    """Adagrad that one can differentiate through."""

    @arguments_of(adagrad)
    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(module, *args, **kwargs)
