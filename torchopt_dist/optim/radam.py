"""Gradients → updates by RAdam, as a function and as two classes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from torchopt_dist.arguments.options import hinted
from torchopt_dist.core.types import ScalarOrSchedule
from torchopt_dist.optim._signatures import arguments_of
from torchopt_dist.optim.meta_optimizer import MetaOptimizer
from torchopt_dist.optim.optimizer import Optimizer
from torchopt_dist.transform._hyperparameters import HyperParameter, check_decays
from torchopt_dist.transform.add_decayed_weights import penalized
from torchopt_dist.transform.base import GradientTransformation, chain
from torchopt_dist.transform.scale import scale_by_learning_rate
from torchopt_dist.transform.scale_by_radam import scale_by_radam

__all__ = ["MetaRAdam", "RAdam", "radam"]


@hinted
def radam(
    lr: ScalarOrSchedule = 1e-3,
    betas: tuple[HyperParameter, HyperParameter] = (0.9, 0.999),
    eps: HyperParameter = 1e-6,
    weight_decay: HyperParameter = 0.0,
    *,
    moment_requires_grad: bool = False,
    maximize: bool = False,
) -> GradientTransformation:
    """RAdam, as ``torch.optim.RAdam``: :func:`~torchopt_dist.transform.scale_by_radam`, times the learning rate.

    [Liu et al. 2020, On the Variance of the Adaptive Learning Rate and Beyond.]

    Args:
        lr: learning rate: a number that is at least 0, a tensor of one element, a schedule (the number of steps
            made so far → a learning rate), or a tree of numbers and tensors, one for each parameter.
        betas: decays of the running averages of the gradients and of their squares, at least 0 and below 1; numbers
            or tensors of one element.
        eps: added to the denominator, at least 0; a number or a tensor of one element.
        weight_decay: how much of a parameter is added to its gradient (L2 penalty), at least 0; a number or a tensor of
            one element.
        moment_requires_grad: make the initial averages leaves that require grad.
        maximize: maximize the objective.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a number is out of its range, or a tensor has more than one element.

    Example:
        >>> import torch
        >>> w = torch.tensor([1.0, -2.0])
        >>> impl = radam(lr=0.1)
        >>> impl.update(2 * w, impl.init(w), params=w)[0]
        tensor([-0.2000,  0.4000])
    """
    check_decays("betas", betas, 2)
    return chain(
        *penalized(weight_decay, maximize),
        scale_by_radam(*betas, eps, moment_requires_grad),
        scale_by_learning_rate(lr),
    )


class RAdam(Optimizer, transformation=radam, eps=1e-8):
    """RAdam in place, as ``torch.optim.RAdam``."""

    _decouples = False

    @arguments_of(radam)
    def __init__(self, params: Iterable[Any], *args: Any, **kwargs: Any) -> None:
        super().__init__(params, *args, **kwargs)


class MetaRAdam(MetaOptimizer, transformation=radam, eps=1e-8, moment_requires_grad=True):
    """RAdam that one can differentiate through."""

    @arguments_of(radam)
    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(module, *args, **kwargs)
