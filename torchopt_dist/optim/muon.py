"""Gradients of matrices → updates by Muon, as a function and as two classes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from torchopt_dist.arguments.options import hinted
from torchopt_dist.core.types import Params, ScalarOrSchedule
from torchopt_dist.ops import _foreach as foreach
from torchopt_dist.optim._signatures import arguments_of
from torchopt_dist.optim.meta_optimizer import MetaOptimizer
from torchopt_dist.optim.optimizer import Optimizer
from torchopt_dist.transform._elementwise import elementwise, filled
from torchopt_dist.transform._hyperparameters import HyperParameter, check_decay
from torchopt_dist.transform.add_decayed_weights import add_decayed_weights, penalized
from torchopt_dist.transform.base import GradientTransformation, chain
from torchopt_dist.transform.orthogonalize import orthogonalize
from torchopt_dist.transform.scale import scale_by_learning_rate
from torchopt_dist.transform.trace import TraceState

__all__ = ["MetaMuon", "Muon", "muon"]


@hinted
def muon(
    lr: ScalarOrSchedule = 1e-3,
    weight_decay: HyperParameter = 0.1,
    momentum: HyperParameter = 0.95,
    nesterov: bool = True,
    ns_coefficients: Sequence[float] = (3.4445, -4.7750, 2.0315),
    eps: float = 1e-7,
    ns_steps: int = 5,
    adjust_lr_fn: str | None = None,
    *,
    moment_requires_grad: bool = False,
    maximize: bool = False,
) -> GradientTransformation:
    """Muon, as ``torch.optim.Muon``: orthogonalized momentum, for matrices only.

    With ``m = momentum * m + (1 - momentum) * g`` and ``u = (1 - momentum) * g + momentum * m`` (``u = m`` without
    Nesterov's look-ahead), ``p - lr * (factor * O(u) + weight_decay * p)``, where factor and ``O`` are those of
    :func:`~torchopt_dist.transform.orthogonalize`; the factor is not on the weight decay.

    For the parameters of a model that are not matrices, and for embeddings and the last layer, use another optimizer:
    :func:`~torchopt_dist.transform.partition` splits the parameters between several.

    [Jordan et al. 2024, Muon: An optimizer for hidden layers in neural networks.]

    Args:
        lr: learning rate: a number that is at least 0, a tensor of one element, a schedule (the number of steps
            made so far → a learning rate), or a tree of numbers and tensors, one for each parameter.
        weight_decay: decoupled, at least 0; a number or a tensor of one element.
        momentum: decay of the running average of the gradients, at least 0 and below 1; a number or a tensor of one
            element.
        nesterov: use Nesterov's look-ahead.
        ns_coefficients: the three coefficients of an iteration.
        eps: the smallest norm by which a matrix is divided.
        ns_steps: how many iterations.
        adjust_lr_fn: the factor for a matrix's shape: ``'original'`` (or ``None``) or ``'match_rms_adamw'``.
        moment_requires_grad: make the initial averages leaves that require grad.
        maximize: maximize the objective.

    Raises:
        TypeError: an argument has the wrong type; from ``init``: a parameter is complex.
        ValueError: a number is out of its range, or a tensor has more than one element; from ``init``: a parameter has
            not two dimensions.

    Example:
        >>> import torch
        >>> w = torch.tensor([[3.0, 0.0], [0.0, 1.0]])
        >>> impl = muon(lr=0.1, weight_decay=0.0, ns_coefficients=(2.0, -1.5, 0.5), ns_steps=10)
        >>> impl.update(w, impl.init(w), params=w)[0].round(decimals=3)
        tensor([[-0.1000, -0.0000],
                [-0.0000, -0.1000]])
    """
    check_decay("momentum", momentum)
    return chain(
        *penalized(0.0, maximize),
        elementwise(
            TraceState,
            partial(_init, moment_requires_grad),
            partial(_average, momentum=momentum, nesterov=bool(nesterov)),
        ),
        orthogonalize(ns_coefficients, ns_steps, eps, adjust_lr_fn),
        add_decayed_weights(weight_decay),
        scale_by_learning_rate(lr),
    )


def _init(requires_grad: bool, params: Params, /) -> TraceState:
    return TraceState(filled(params, requires_grad=requires_grad), ())


def _average(
    grads: list[Tensor], averages: list[Tensor], *, momentum: HyperParameter, nesterov: bool, inplace: bool
) -> tuple[list[Tensor], ...]:
    averages = foreach.interpolate(averages, grads, 1 - momentum, inplace=inplace)
    return foreach.interpolate(grads, averages, momentum) if nesterov else [*averages], averages


class Muon(Optimizer, transformation=muon):
    """Muon in place, as ``torch.optim.Muon``."""

    @arguments_of(muon)
    def __init__(self, params: Iterable[Any], *args: Any, **kwargs: Any) -> None:
        super().__init__(params, *args, **kwargs)


class MetaMuon(MetaOptimizer, transformation=muon, moment_requires_grad=True):
    """Muon that one can differentiate through."""

    @arguments_of(muon)
    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(module, *args, **kwargs)
