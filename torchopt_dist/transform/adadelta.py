"""Gradients → updates by Adadelta: steps of the size of the last ones, relative to that of the last gradients."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from torch import Tensor

from torchopt_dist.core.types import ScalarOrSchedule, TensorTree
from torchopt_dist.ops import _foreach as foreach
from torchopt_dist.transform._elementwise import elementwise
from torchopt_dist.transform._hyperparameters import HyperParameter, check_at_least_zero, check_decay
from torchopt_dist.transform._texts import documented
from torchopt_dist.transform.add_decayed_weights import penalized
from torchopt_dist.transform.base import GradientTransformation, chain
from torchopt_dist.transform.scale import scale_by_learning_rate

__all__ = ["ScaleByAdadeltaState", "adadelta", "scale_by_adadelta"]


class ScaleByAdadeltaState(NamedTuple):
    """The state of :func:`scale_by_adadelta`; the names are those of ``torch.optim.Adadelta``."""

    square_avg: TensorTree
    """Running averages of the squared gradients: a tensor for each parameter, of its shape and dtype."""
    acc_delta: TensorTree
    """Running averages of the squared steps."""


@documented
def scale_by_adadelta(
    rho: HyperParameter = 0.9, eps: HyperParameter = 1e-6, moment_requires_grad: bool = False
) -> GradientTransformation:
    """Adadelta's direction ``d = sqrt(a + eps) / sqrt(v + eps) * g``.

    ``v`` and ``a`` are the running averages of ``g**2`` and of ``d**2``.

    [Zeiler 2012, ADADELTA: An Adaptive Learning Rate Method, algorithm 1.]

    Args:
        rho: decay of the averages; a number that is at least 0 and below 1, or a tensor of one element, which may
            require grad.
        eps: added below both roots, at least 0; a number or a tensor of one element.
        moment_requires_grad: leaves at the start.

    Example:
        >>> import torch
        >>> w = torch.tensor([1.0, -2.0])
        >>> impl = scale_by_adadelta()
        >>> impl.update(2 * w, impl.init(w), params=w)[0]
        tensor([ 0.0032, -0.0032])
    """
    check_decay("rho", rho)
    check_at_least_zero("eps", eps)
    return elementwise(ScaleByAdadeltaState, partial(_formula, rho=rho, eps=eps), moment_requires_grad)


def _formula(
    grads: list[Tensor],
    square_avgs: list[Tensor],
    acc_deltas: list[Tensor],
    *,
    rho: HyperParameter,
    eps: HyperParameter,
    inplace: bool,
) -> tuple[list[Tensor], ...]:
    square_avgs = foreach.multiply(square_avgs, rho, inplace=inplace)
    square_avgs = foreach.add_product(square_avgs, grads, grads, 1 - rho, inplace=inplace)
    below = foreach.square_root(foreach.add_number(square_avgs, eps))
    above = foreach.square_root(foreach.add_number(acc_deltas, eps))
    deltas = foreach.product(foreach.divide(above, below), grads)
    acc_deltas = foreach.multiply(acc_deltas, rho, inplace=inplace)
    acc_deltas = foreach.add_product(acc_deltas, deltas, deltas, 1 - rho, inplace=inplace)
    return deltas, square_avgs, acc_deltas


@documented
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
        lr: learning rate.
        rho: decay of the running averages, at least 0 and below 1; a number or a tensor of one element.
        eps: added below the roots, at least 0; a number or a tensor of one element.
        weight_decay: L2 penalty.
        moment_requires_grad: leaves at the start.
        maximize: maximize the objective.

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
