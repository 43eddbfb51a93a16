"""Gradients → updates by LAMB, as a function and as two classes."""

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
from torchopt_dist.transform.add_decayed_weights import add_decayed_weights, penalized
from torchopt_dist.transform.base import GradientTransformation, chain
from torchopt_dist.transform.masked import Mask
from torchopt_dist.transform.scale import scale_by_learning_rate
from torchopt_dist.transform.scale_by_adam import scale_by_adam
from torchopt_dist.transform.scale_by_trust_ratio import scale_by_trust_ratio

__all__ = ["LAMB", "MetaLAMB", "lamb"]


@hinted
def lamb(
    lr: ScalarOrSchedule = 1e-3,
    betas: tuple[HyperParameter, HyperParameter] = (0.9, 0.999),
    eps: HyperParameter = 1e-6,
    weight_decay: HyperParameter = 0.0,
    *,
    mask: Mask = None,
    moment_requires_grad: bool = False,
    maximize: bool = False,
) -> GradientTransformation:
    """LAMB, for large batches: ``p - lr * |p| / |u| * u`` for each parameter, with ``u = d + weight_decay * p``.

    ``d`` is Adam's direction, of :func:`~torchopt_dist.transform.scale_by_adam`; where a norm is 0 the ratio is 1.

    [You et al. 2020, Large Batch Optimization for Deep Learning: Training BERT in 76 minutes, algorithm 2.]

    Args:
        lr: learning rate: a number that is at least 0, a tensor of one element, a schedule (the number of steps
            made so far → a learning rate), or a tree of numbers and tensors, one for each parameter.
        betas: decays of the running averages of the gradients and of their squares, at least 0 and below 1; numbers
            or tensors of one element.
        eps: added to the denominator, at least 0; a number or a tensor of one element.
        weight_decay: how much of a parameter is added to its direction, at least 0; a number or a tensor of one
            element.
        mask: which parameters decay: a pattern of their names, such as ``"*.weight"``, or a list of patterns; a tree of
            bools of the parameters' structure, or a function from the parameters to such a tree; all, if not given.
        moment_requires_grad: make the initial averages leaves that require grad.
        maximize: maximize the objective.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a number is out of its range, or a tensor has more than one element.

    Example:
        >>> import torch
        >>> w = torch.tensor([3.0, -4.0])
        >>> impl = lamb(lr=0.1, eps=0.0)
        >>> impl.update(2 * w, impl.init(w), params=w)[0]  # the direction (1, -1) gets the norm 5
        tensor([-0.3536,  0.3536])
    """
    check_decays("betas", betas, 2)
    return chain(
        *penalized(0.0, maximize),
        scale_by_adam(*betas, eps, moment_requires_grad=moment_requires_grad),
        add_decayed_weights(weight_decay, mask),
        scale_by_trust_ratio(),
        scale_by_learning_rate(lr),
    )


class LAMB(Optimizer, transformation=lamb):
    """LAMB in place."""

    @arguments_of(lamb)
    def __init__(self, params: Iterable[Any], *args: Any, **kwargs: Any) -> None:
        super().__init__(params, *args, **kwargs)


class MetaLAMB(MetaOptimizer, transformation=lamb, moment_requires_grad=True):
    """LAMB that one can differentiate through."""

    @arguments_of(lamb)
    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(module, *args, **kwargs)
