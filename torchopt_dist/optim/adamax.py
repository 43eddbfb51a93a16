"""Gradients → updates by Adamax, as a function and as two classes."""

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
from torchopt_dist.transform.scale_by_adamax import scale_by_adamax

__all__ = ["Adamax", "MetaAdamax", "adamax"]


@hinted
def adamax(
    lr: ScalarOrSchedule = 1e-3,
    betas: tuple[HyperParameter, HyperParameter] = (0.9, 0.999),
    eps: HyperParameter = 1e-6,
    weight_decay: HyperParameter = 0.0,
    *,
    moment_requires_grad: bool = False,
    maximize: bool = False,
) -> GradientTransformation:
    """Adamax, as ``torch.optim.Adamax``: :func:`~torchopt_dist.transform.scale_by_adamax`, times the learning rate.

    [Kingma and Ba 2015, Adam: A Method for Stochastic Optimization, section 7.1.]

    Args:
        lr: learning rate: a number that is at least 0, a tensor of one element, a schedule (the number of steps
            made so far → a learning rate), or a tree of numbers and tensors, one for each parameter.
        betas: decays of the running average of the gradients and of their largest absolute value, at least 0 and
            below 1; numbers or tensors of one element.
        eps: added to the absolute value, at least 0; a number or a tensor of one element.
        weight_decay: how much of a parameter is added to its gradient (L2 penalty), at least 0; a number or a tensor of
            one element.
        moment_requires_grad: make the initial state's tensors leaves that require grad.
        maximize: maximize the objective.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a number is out of its range, or a tensor has more than one element.

    Example:
        >>> import torch
        >>> w = torch.tensor([1.0, -2.0])
        >>> impl = adamax(lr=0.1)
        >>> impl.update(2 * w, impl.init(w), params=w)[0]
        tensor([-0.1000,  0.1000])
    """
    check_decays("betas", betas, 2)
    return chain(
        *penalized(weight_decay, maximize),
        scale_by_adamax(*betas, eps, moment_requires_grad),
        scale_by_learning_rate(lr),
    )


class Adamax(Optimizer, transformation=adamax, lr=2e-3, eps=1e-8):
    """Adamax in place, as ``torch.optim.Adamax``."""

    @arguments_of(adamax)
    def __init__(self, params: Iterable[Any], *args: Any, **kwargs: Any) -> None:
        super().__init__(params, *args, **kwargs)


class MetaAdamax(MetaOptimizer, transformation=adamax, lr=2e-3, eps=1e-8, moment_requires_grad=True):
    """Adamax that one can differentiate through."""

    @arguments_of(adamax)
    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(module, *args, **kwargs)
