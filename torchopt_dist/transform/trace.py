"""Gradients → their running sum: momentum, as in ``torch.optim.SGD``."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from torchopt_dist.core.types import Params, TensorTree
from torchopt_dist.ops._sgd import sgd
from torchopt_dist.transform._elementwise import counts, elementwise, filled
from torchopt_dist.transform._hyperparameters import HyperParameter, check_at_least_zero, is_zero
from torchopt_dist.transform.base import GradientTransformation, identity

__all__ = ["TraceState", "check_momentum", "first_trace", "trace"]


class TraceState(NamedTuple):
    """The state of :func:`trace`."""

    momentum_buffer: TensorTree
    """The running sums: a tensor for each parameter, of its shape and dtype."""
    step: TensorTree
    """How many gradients each parameter has had: a 0-d float32 tensor each, on the CPU; ``()`` without
    dampening, where the first gradient needs no distinction."""


def check_momentum(momentum: Any, dampening: Any, nesterov: bool) -> None:
    """Check arguments as :func:`trace` does.

    Raises:
        TypeError: one of them is not a number or a tensor.
        ValueError: one of them is negative, or ``nesterov`` comes without a momentum or with dampening.
    """
    check_at_least_zero("momentum", momentum)
    check_at_least_zero("dampening", dampening)
    if nesterov and (is_zero(momentum) or not is_zero(dampening)):
        raise ValueError(
            f"`nesterov` needs a `momentum` above 0 and a `dampening` of 0, got {momentum} and {dampening}"
        )


def trace(
    momentum: HyperParameter = 0.9,
    dampening: HyperParameter = 0.0,
    nesterov: bool = False,
    moment_requires_grad: bool = False,
) -> GradientTransformation:
    """Momentum, by the formula and the first step of ``torch.optim.SGD``.

    ``b = g`` at a parameter's first gradient, then ``b = momentum * b + (1 - dampening) * g``; the update is
    ``b``, or ``g + momentum * b`` with Nesterov's look-ahead. [Sutskever et al. 2013, On the importance of
    initialization and momentum in deep learning.]

    Args:
        momentum: how much of the running sum stays; a number that is at least 0 (0: the identity), or a
            tensor of one element, which may require grad.
        dampening: how much of a gradient is left out, from the second one on; as ``momentum``.
        nesterov: use Nesterov's look-ahead.
        moment_requires_grad: make the initial running sums leaves that require grad, so that one can
            differentiate with respect to them.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is negative, or ``nesterov`` comes without a momentum or with dampening.

    Example:
        >>> import torch
        >>> w = torch.tensor([1.0, -2.0])
        >>> impl = trace(0.9, nesterov=True)
        >>> impl.update(2 * w, impl.init(w), params=w)[0]
        tensor([ 3.8000, -7.6000])
    """
    check_momentum(momentum, dampening, nesterov)
    if is_zero(momentum):
        return identity()
    return elementwise(
        TraceState,
        partial(_formula, momentum=momentum, dampening=dampening, nesterov=nesterov),
        first=partial(first_trace, not is_zero(dampening), moment_requires_grad),
        sparse=True,
    )


def first_trace(dampened: bool, requires_grad: bool, params: Params, /) -> TraceState:
    """The first state, with counts if there is a dampening."""
    return TraceState(filled(params, requires_grad=requires_grad), counts(params) if dampened else ())


def _formula(
    grads: list[Tensor],
    sums: list[Tensor],
    *steps: list[Tensor],
    momentum: HyperParameter,
    dampening: HyperParameter,
    nesterov: bool,
    inplace: bool,
) -> tuple[list[Tensor], ...]:
    return sgd(
        grads,
        sums,
        *steps,
        lr=-1.0,
        momentum=momentum,
        dampening=dampening,
        nesterov=nesterov,
        fused=False,
        inplace=inplace,
    )
