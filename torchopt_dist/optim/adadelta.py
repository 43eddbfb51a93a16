"""Gradients → updates by Adadelta, as a function and as two classes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from torchopt_dist.arguments.options import hinted
from torchopt_dist.core.types import ScalarOrSchedule
from torchopt_dist.optim._signatures import arguments_of
from torchopt_dist.optim.meta_optimizer import MetaOptimizer
from torchopt_dist.optim.optimizer import Optimizer
from torchopt_dist.transform._hyperparameters import HyperParameter
from torchopt_dist.transform.add_decayed_weights import penalized
from torchopt_dist.transform.base import GradientTransformation, chain
from torchopt_dist.transform.scale import scale_by_learning_rate
from torchopt_dist.transform.scale_by_adadelta import scale_by_adadelta

__all__ = ["Adadelta", "MetaAdadelta", "adadelta"]


@hinted
def adadelta(
    lr: ScalarOrSchedule = 1e-3,
    rho: HyperParameter = 0.9,
    eps: HyperParameter = 1e-6,
    weight_decay: HyperParameter = 0.0,
    *,
    moment_requires_grad: bool = False,
    maximize: bool = False,
) -> GradientTransformation:
    """Adadelta, as ``torch.optim.Adadelta``: :func:`~torchopt_dist.transform.scale_by_adadelta`, times ``lr``.

    [Zeiler 2012, ADADELTA: An Adaptive Learning Rate Method.]

    Args:
        lr: learning rate: a number that is at least 0, a tensor of one element, a schedule (the number of steps
            made so far → a learning rate), or a tree of numbers and tensors, one for each parameter.
        rho: decay of the running averages, at least 0 and below 1; a number or a tensor of one element.
        eps: added below the roots, at least 0; a number or a tensor of one element.
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
        >>> impl = adadelta(lr=1.0)
        >>> impl.update(2 * w, impl.init(w), params=w)[0]
        tensor([-0.0032,  0.0032])
    """
    return chain(
        *penalized(weight_decay, maximize),
        scale_by_adadelta(rho, eps, moment_requires_grad),
        scale_by_learning_rate(lr),
    )


class Adadelta(Optimizer, transformation=adadelta, lr=1.0):
    """Adadelta in place, as ``torch.optim.Adadelta``."""

    _counts_for_torch = True

    @arguments_of(adadelta)
    def __init__(self, params: Iterable[Any], *args: Any, **kwargs: Any) -> None:
        super().__init__(params, *args, **kwargs)


class MetaAdadelta(MetaOptimizer, transformation=adadelta, lr=1.0, moment_requires_grad=True):
    """Adadelta that one can differentiate through."""

    @arguments_of(adadelta)
    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(module, *args, **kwargs)
