"""Gradients → Adam's direction: their running average over the root of that of their squares."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from torch import Tensor

from torchopt_dist.core.types import TensorTree
from torchopt_dist.ops import _bias_correction as bias_correction
from torchopt_dist.ops import _foreach as foreach
from torchopt_dist.ops._adam import adam
from torchopt_dist.transform._elementwise import elementwise, first_state
from torchopt_dist.transform._hyperparameters import HyperParameter, check_at_least_zero, check_decay
from torchopt_dist.transform.base import GradientTransformation

__all__ = ["ScaleByAdamState", "ScaleByAmsgradState", "scale_by_adam"]


class ScaleByAdamState(NamedTuple):
    """The state of :func:`scale_by_adam`; the names are those of ``torch.optim.Adam``."""

    exp_avg: TensorTree
    """Running averages of the gradients: a tensor for each parameter, of its shape and dtype."""
    exp_avg_sq: TensorTree
    """Running averages of their squares."""
    step: TensorTree
    """How many gradients each parameter has had: a 0-d float32 tensor each, on the CPU."""


class ScaleByAmsgradState(NamedTuple):
    """The state of :func:`scale_by_adam` with ``amsgrad``; the names are those of ``torch.optim.Adam``."""

    exp_avg: TensorTree
    """As in :class:`ScaleByAdamState`; so are the next two."""
    exp_avg_sq: TensorTree
    max_exp_avg_sq: TensorTree
    """The greatest that ``exp_avg_sq`` has been: a tensor for each parameter, of its shape and dtype."""
    step: TensorTree


def scale_by_adam(
    b1: HyperParameter = 0.9,
    b2: HyperParameter = 0.999,
    eps: HyperParameter = 1e-8,
    eps_root: HyperParameter = 0.0,
    moment_requires_grad: bool = False,
    *,
    amsgrad: bool = False,
    fused: bool | None = None,
) -> GradientTransformation:
    """Adam's direction ``m / (sqrt(v + eps_root) + eps)``, ``m`` and ``v`` corrected for their start at 0.

    ``m`` and ``v`` are the running averages of the gradients and of their squares. [Kingma and Ba 2015, Adam: A
    Method for Stochastic Optimization, algorithm 1.] With ``amsgrad`` the greatest ``v`` so far stands
    for ``v``, and is corrected after it is found, as in ``torch.optim.Adam``. [Reddi, Kale and Kumar 2018, On the
    Convergence of Adam and Beyond, algorithm 2.]

    Args:
        b1: decay of the average of the gradients; a number that is at least 0 and below 1, or a tensor of one
            element, which may require grad.
        b2: decay of the average of their squares, with the range and types of ``b1``.
        eps: added to the root, at least 0; a number or a tensor of one element.
        eps_root: added below the root, at least 0; a number or a tensor of one element. With 0, the root's derivative
            at 0 is taken to be 0, which is the limit as the gradient goes to 0.
        moment_requires_grad: make the initial averages leaves that require grad, so that one can differentiate with
            respect to them.
        amsgrad: divide by the largest average of the squares so far. There is no kernel for it: its formula runs.
        fused: ``None`` uses a kernel where there is one and it helps, ``False`` never uses one, ``True`` raises an
            error where there is none.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of its range.
        RuntimeError: ``fused=True`` with ``amsgrad``; from ``update``: where there is no kernel; the message says why.

    Example:
        >>> import torch
        >>> w = torch.tensor([1.0, -2.0])
        >>> impl = scale_by_adam()
        >>> impl.update(2 * w, impl.init(w), params=w)[0]
        tensor([ 1., -1.])
    """
    check_decay("b1", b1)
    check_decay("b2", b2)
    check_at_least_zero("eps", eps)
    check_at_least_zero("eps_root", eps_root)
    if amsgrad:
        if fused:
            raise RuntimeError(
                "`fused=True` cannot be used: there is no kernel for `amsgrad`; leave `fused` out"
            )
        return elementwise(
            ScaleByAmsgradState,
            partial(first_state, ScaleByAmsgradState, moment_requires_grad),
            partial(_amsgrad, b1=b1, b2=b2, eps=eps, eps_root=eps_root),
        )
    return elementwise(
        ScaleByAdamState,
        partial(first_state, ScaleByAdamState, moment_requires_grad),
        partial(adam, b1=b1, b2=b2, eps=eps, eps_root=eps_root, fused=fused),
    )


def _amsgrad(
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    max_exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    *,
    b1: HyperParameter,
    b2: HyperParameter,
    eps: HyperParameter,
    eps_root: HyperParameter,
    inplace: bool,
) -> tuple[list[Tensor], ...]:
    steps = foreach.add_number(steps, 1, inplace=inplace)
    exp_avgs = foreach.interpolate(exp_avgs, grads, 1 - b1, inplace=inplace)
    exp_avg_sqs = foreach.multiply(exp_avg_sqs, b2, inplace=inplace)
    exp_avg_sqs = foreach.add_product(exp_avg_sqs, grads, grads, 1 - b2, inplace=inplace)
    max_exp_avg_sqs = foreach.maximum(max_exp_avg_sqs, exp_avg_sqs, inplace=inplace)
    bias_correction1, bias_correction2 = bias_correction.bias_corrections((b1, b2), steps)
    below = foreach.multiply(max_exp_avg_sqs, foreach.inverse(bias_correction2))
    if not foreach.is_zero(eps_root):
        below = foreach.add_number(below, eps_root)
    below = foreach.add_number(foreach.square_root(below), eps)
    directions = foreach.multiply(foreach.divide(exp_avgs, below), foreach.inverse(bias_correction1))
    return directions, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps
