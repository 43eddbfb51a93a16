"""Gradients → Lion's direction: the signs of an average of the gradient and its running average."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from torchopt_dist.core.types import TensorTree
from torchopt_dist.ops import _foreach as foreach
from torchopt_dist.transform._elementwise import elementwise, first_state
from torchopt_dist.transform._hyperparameters import HyperParameter, check_decay
from torchopt_dist.transform.base import GradientTransformation

__all__ = ["ScaleByLionState", "scale_by_lion"]


class ScaleByLionState(NamedTuple):
    """The state of :func:`scale_by_lion`."""

    exp_avg: TensorTree
    """Running averages of the gradients: a tensor for each parameter, of its shape and dtype."""


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
        moment_requires_grad: make the initial averages leaves that require grad.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of its range.

    Example:
        >>> import torch
        >>> w = torch.tensor([1.0, -2.0])
        >>> impl = scale_by_lion()
        >>> impl.update(2 * w, impl.init(w), params=w)[0]
        tensor([ 1., -1.])
    """
    check_decay("b1", b1)
    check_decay("b2", b2)
    return elementwise(
        ScaleByLionState,
        partial(first_state, ScaleByLionState, moment_requires_grad),
        partial(_formula, b1=b1, b2=b2),
    )


def _formula(
    grads: list[Tensor], exp_avgs: list[Tensor], *, b1: HyperParameter, b2: HyperParameter, inplace: bool
) -> tuple[list[Tensor], ...]:
    mixed = foreach.interpolate(exp_avgs, grads, 1 - b1)
    signs = [x.sign() for x in mixed] if foreach.runs_in_a_loop(mixed) else list(torch._foreach_sign(mixed))
    return signs, foreach.interpolate(exp_avgs, grads, 1 - b2, inplace=inplace)
