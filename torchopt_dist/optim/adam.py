"""Gradients → updates by Adam, as a function and as two classes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from torchopt_dist.arguments.options import hinted
from torchopt_dist.core.types import ScalarOrSchedule
from torchopt_dist.optim._fused_adam import fused_adam
from torchopt_dist.optim._signatures import arguments_of
from torchopt_dist.optim.meta_optimizer import MetaOptimizer
from torchopt_dist.optim.optimizer import Optimizer
from torchopt_dist.transform._hyperparameters import (
    HyperParameter,
    check_decays,
)
from torchopt_dist.transform.add_decayed_weights import penalized
from torchopt_dist.transform.base import ChainedGradientTransformation, GradientTransformation
from torchopt_dist.transform.scale import scale_by_learning_rate
from torchopt_dist.transform.scale_by_adam import scale_by_adam

__all__ = ["Adam", "MetaAdam", "adam"]


@hinted
def adam(
    lr: ScalarOrSchedule = 1e-3,
    betas: tuple[HyperParameter, HyperParameter] = (0.9, 0.999),
    eps: HyperParameter = 1e-8,
    weight_decay: HyperParameter = 0.0,
    amsgrad: bool = False,
    *,
    eps_root: HyperParameter = 0.0,
    moment_requires_grad: bool = False,
    maximize: bool = False,
    fused: bool | None = None,
) -> GradientTransformation:
    """Adam, as ``torch.optim.Adam``: :func:`~torchopt_dist.transform.scale_by_adam`, times the learning rate.

    [Kingma and Ba 2015, Adam: A Method for Stochastic Optimization.]

    Args:
        lr: learning rate: a number that is at least 0, a tensor of one element, a schedule (the number of steps
            made so far → a learning rate), or a tree of numbers and tensors, one for each parameter.
        betas: decays of the running averages of the gradients and of their squares, at least 0 and below 1; numbers
            or tensors of one element.
        eps: added to the denominator, at least 0; a number or a tensor of one element.
        weight_decay: how much of a parameter is added to its gradient (L2 penalty), at least 0; a number or a tensor of
            one element.
        amsgrad: divide by the largest average of the squares so far. There is no kernel for it: its formula runs.
            [Reddi, Kale and Kumar 2018, On the Convergence of Adam and Beyond.]
        eps_root: added below the root of the denominator, at least 0; a number or a tensor of one element.
        moment_requires_grad: make the initial averages leaves that require grad.
        maximize: maximize the objective.
        fused: ``None`` uses a kernel where there is one and it helps, ``False`` never uses one, ``True`` raises an
            error where there is none.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a number is out of its range, or a tensor has more than one element.
        RuntimeError: ``fused=True`` with ``amsgrad``; at a step: where there is no kernel; the message says why.

    Example:
        >>> import torch
        >>> w = torch.tensor([1.0, -2.0])
        >>> impl = adam(lr=0.1)
        >>> impl.update(2 * w, impl.init(w), params=w)[0]
        tensor([-0.1000,  0.1000])
    """
    check_decays("betas", betas, 2)
    b1, b2 = betas
    options = {
        "lr": lr,
        "b1": b1,
        "b2": b2,
        "eps": eps,
        "eps_root": eps_root,
        "weight_decay": weight_decay,
        "maximize": maximize,
        "fused": fused,
    }
    return ChainedGradientTransformation(
        *penalized(weight_decay, maximize),
        scale_by_adam(b1, b2, eps, eps_root, moment_requires_grad, amsgrad=amsgrad, fused=fused),
        scale_by_learning_rate(lr),
        fused_step=None if amsgrad else fused_adam(**options),
    )


class Adam(Optimizer, transformation=adam):
    """Adam in place, as ``torch.optim.Adam``."""

    _decouples = False

    @arguments_of(adam)
    def __init__(self, params: Iterable[Any], *args: Any, **kwargs: Any) -> None:
        super().__init__(params, *args, **kwargs)


class MetaAdam(MetaOptimizer, transformation=adam, moment_requires_grad=True):
    """Adam that one can differentiate through."""

    @arguments_of(adam)
    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(module, *args, **kwargs)
