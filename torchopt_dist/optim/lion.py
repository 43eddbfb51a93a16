"""Gradients → updates by Lion, as a function and as two classes."""

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
from torchopt_dist.transform.scale_by_lion import scale_by_lion

__all__ = ["Lion", "MetaLion", "lion"]


@hinted
def lion(
    lr: ScalarOrSchedule = 1e-4,
    betas: tuple[HyperParameter, HyperParameter] = (0.9, 0.99),
    weight_decay: HyperParameter = 0.0,
    *,
    mask: Mask = None,
    moment_requires_grad: bool = False,
    maximize: bool = False,
) -> GradientTransformation:
    """Lion: ``p - lr * (d + weight_decay * p)``.

    ``d`` is the direction of :func:`~torchopt_dist.transform.scale_by_lion`, the sign of each entry; so it needs a
    learning rate three to ten times smaller than Adam's, and a weight decay larger by the same factor.

    [Chen et al. 2023, Symbolic Discovery of Optimization Algorithms, algorithm 2.]

    Args:
        lr: learning rate: a number that is at least 0, a tensor of one element, a schedule (the number of steps
            made so far → a learning rate), or a tree of numbers and tensors, one for each parameter.
        betas: decays of the average whose sign is taken, and of the average that is kept, at least 0 and below 1;
            numbers or tensors of one element.
        weight_decay: decoupled, at least 0; a number or a tensor of one element.
        mask: which parameters decay: a pattern of their names, such as ``"*.weight"``, or a list of patterns; a tree of
            bools of the parameters' structure, or a function from the parameters to such a tree; all, if not given.
        moment_requires_grad: make the initial averages leaves that require grad.
        maximize: maximize the objective.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a number is out of its range, or a tensor has more than one element.

    Example:
        >>> import torch
        >>> w = torch.tensor([1.0, -2.0])
        >>> impl = lion(lr=0.1, weight_decay=0.5)
        >>> impl.update(2 * w, impl.init(w), params=w)[0]
        tensor([-0.1500,  0.2000])
    """
    check_decays("betas", betas, 2)
    return chain(
        *penalized(0.0, maximize),
        scale_by_lion(*betas, moment_requires_grad),
        add_decayed_weights(weight_decay, mask),
        scale_by_learning_rate(lr),
    )


class Lion(Optimizer, transformation=lion):
    """Lion in place."""

    @arguments_of(lion)
    def __init__(self, params: Iterable[Any], *args: Any, **kwargs: Any) -> None:
        super().__init__(params, *args, **kwargs)


class MetaLion(MetaOptimizer, transformation=lion, moment_requires_grad=True):
    """Lion that one can differentiate through."""

    @arguments_of(lion)
    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(module, *args, **kwargs)
