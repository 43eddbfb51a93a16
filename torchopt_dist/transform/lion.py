"""Gradients → updates by Lion: the signs of an average of the gradient and its running average."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from torchopt_dist.core.types import ScalarOrSchedule, TensorTree
from torchopt_dist.ops import _foreach as foreach
from torchopt_dist.transform._elementwise import elementwise
from torchopt_dist.transform._hyperparameters import HyperParameter, check_decay, check_decays
from torchopt_dist.transform._texts import documented
from torchopt_dist.transform.add_decayed_weights import add_decayed_weights, penalized
from torchopt_dist.transform.base import GradientTransformation, chain
from torchopt_dist.transform.masked import Mask
from torchopt_dist.transform.scale import scale_by_learning_rate

__all__ = ["ScaleByLionState", "lion", "scale_by_lion"]


class ScaleByLionState(NamedTuple):
    """The state of :func:`scale_by_lion`."""

    exp_avg: TensorTree
    """Running averages of the gradients: a tensor for each parameter, of its shape and dtype."""


@documented
def scale_by_lion(
    b1: HyperParameter = 0.9, b2: HyperParameter = 0.99, moment_requires_grad: bool = False
) -> GradientTransformation:
    """Lion's direction ``sign(b1 * m + (1 - b1) * g)``, and then ``m = b2 * m + (1 - b2) * g``.

    [Chen et al. 2023, Symbolic Discovery of Optimization Algorithms, algorithm 2.] A sign has the derivative 0, so
    nothing flows back through a direction. Of a complex gradient the real and the imaginary part have a sign each.

    Args:
        b1: decay of the average that the sign is taken of; a number that is at least 0 and below 1, or a tensor of one
            element, which may require grad.
        b2: decay of the average that is kept, with the range and types of ``b1``.
        moment_requires_grad: leaves at the start.

    Example:
        >>> import torch
        >>> w = torch.tensor([1.0, -2.0])
        >>> impl = scale_by_lion()
        >>> impl.update(2 * w, impl.init(w), params=w)[0]
        tensor([ 1., -1.])
    """
    check_decay("b1", b1)
    check_decay("b2", b2)
    return elementwise(ScaleByLionState, partial(_formula, b1=b1, b2=b2), moment_requires_grad)


def _formula(
    grads: list[Tensor], exp_avgs: list[Tensor], *, b1: HyperParameter, b2: HyperParameter, inplace: bool
) -> tuple[list[Tensor], ...]:
    mixed = foreach.interpolate(exp_avgs, grads, 1 - b1)
    signs = [x.sign() for x in mixed] if foreach.runs_in_a_loop(mixed) else list(torch._foreach_sign(mixed))
    return signs, foreach.interpolate(exp_avgs, grads, 1 - b2, inplace=inplace)


@documented
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
        lr: learning rate.
        betas: decays of the average whose sign is taken, and of the average that is kept, at least 0 and below 1;
            numbers or tensors of one element.
        weight_decay: decoupled.
        mask: which parameters decay.
        moment_requires_grad: leaves at the start.
        maximize: maximize the objective.

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
