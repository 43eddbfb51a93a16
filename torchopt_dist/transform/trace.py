"""Gradients → their running sum: momentum, as in ``torch.optim.SGD``."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchopt_dist import pytree
from torchopt_dist.transform import lists
from torchopt_dist.transform.base import GradientTransformation, identity
from torchopt_dist.transform.hyperparameters import HyperParameter, check_at_least_zero, is_zero
from torchopt_dist.typing import OptState, Params, TensorTree, Updates

__all__ = ["TraceState", "check_momentum", "trace"]


class TraceState(NamedTuple):
    """What :func:`trace` remembers."""

    momentum_buffer: TensorTree
    """The running sums: a tensor a parameter, of its shape and dtype."""
    step: TensorTree
    """How many gradients each parameter has had: a 0-d float32 tensor each; ``()`` without dampening, where
    the first gradient needs no distinction."""


def check_momentum(momentum: Any, dampening: Any, nesterov: bool) -> None:
    """Demand what :func:`trace` demands of its arguments.

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
        nesterov: look ahead.
        moment_requires_grad: the first running sums are leaves that require grad, so that one can
            differentiate with respect to them.

    Raises:
        TypeError: an argument is of another type.
        ValueError: one is negative, or ``nesterov`` comes without a momentum or with dampening.
    """
    check_momentum(momentum, dampening, nesterov)
    if is_zero(momentum):
        return identity()
    return GradientTransformation(
        partial(_init, not is_zero(dampening), moment_requires_grad),
        partial(_update, momentum, dampening, nesterov),
    )


def _init(dampened: bool, requires_grad: bool, params: Params, /) -> TraceState:
    def zeros(leaf: Tensor) -> Tensor:
        differentiable = leaf.is_floating_point() or leaf.is_complex()
        return torch.zeros_like(leaf, requires_grad=requires_grad and differentiable)

    def no_steps(leaf: Tensor) -> Tensor:
        return torch.zeros((), dtype=torch.float32, device=leaf.device)

    return TraceState(
        momentum_buffer=pytree.map_tensors(zeros, params),
        step=pytree.map_tensors(no_steps, params) if dampened else (),
    )


def _update(
    momentum: HyperParameter,
    dampening: HyperParameter,
    nesterov: bool,
    updates: Updates,
    state: TraceState,
    *,
    params: Params | None = None,
    inplace: bool = True,
) -> tuple[Updates, OptState]:
    inplace = inplace and not torch.is_grad_enabled()
    leaves, spec = pytree.flatten(updates)
    places = lists.present(leaves)
    grads = lists.pick(leaves, places)
    buffers = pytree.flatten_like(spec, state.momentum_buffer, "state.momentum_buffer", "updates")
    steps = state.step

    sums = lists.multiply(lists.pick(buffers, places), momentum, inplace=inplace)
    sums = lists.add(sums, grads, 1 - dampening, inplace=inplace)
    if not is_zero(dampening):
        counts = pytree.flatten_like(spec, steps, "state.step", "updates")
        seen = lists.pick(counts, places)
        sums = [torch.where(n > 0, b, g) for n, b, g in zip(seen, sums, grads, strict=True)]
        steps = pytree.unflatten(spec, lists.put(counts, places, [n + 1 for n in seen]))
    moved = lists.add(grads, sums, momentum) if nesterov else sums
    return (
        pytree.unflatten(spec, lists.put(leaves, places, moved)),
        TraceState(pytree.unflatten(spec, lists.put(buffers, places, sums)), steps),
    )
