"""Gradients → Adam's direction: their running average over the root of that of their squares."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from torchopt_dist.ops._adam import adam
from torchopt_dist.transform._elementwise import counts, elementwise, filled
from torchopt_dist.transform._hyperparameters import HyperParameter, check_at_least_zero, check_decay
from torchopt_dist.transform.base import GradientTransformation
from torchopt_dist.typing import Params, TensorTree

__all__ = ["ScaleByAdamState", "scale_by_adam"]


class ScaleByAdamState(NamedTuple):
    """What :func:`scale_by_adam` remembers; the names are those of ``torch.optim.Adam``."""

    exp_avg: TensorTree
    """Running averages of the gradients: a tensor a parameter, of its shape and dtype."""
    exp_avg_sq: TensorTree
    """Running averages of their squares, likewise."""
    step: TensorTree
    """How many gradients each parameter has had: a 0-d float32 tensor each, on the CPU."""


def scale_by_adam(
    b1: HyperParameter = 0.9,
    b2: HyperParameter = 0.999,
    eps: HyperParameter = 1e-8,
    eps_root: HyperParameter = 0.0,
    moment_requires_grad: bool = False,
    *,
    fused: bool | None = None,
) -> GradientTransformation:
    """Adam's direction ``m / (sqrt(v + eps_root) + eps)``, ``m`` and ``v`` corrected for their start at 0.

    ``m`` and ``v`` are the running averages of the gradients and of their squares. [Kingma and Ba 2015, Adam: A
    Method for Stochastic Optimization, algorithm 1.]

    Args:
        b1: decay of the average of the gradients; a number that is at least 0 and below 1, or a tensor of one
            element, which may require grad.
        b2: decay of the average of their squares; likewise.
        eps: added to the root, at least 0; a number or a tensor of one element.
        eps_root: added below the root, likewise. With 0, the root's derivative at 0 is taken to be 0, which is the
            limit as the gradient goes to 0.
        moment_requires_grad: the first averages are leaves that require grad, so that one can differentiate with
            respect to them.
        fused: None uses a kernel where there is one and it helps, False never, True demands it.

    Raises:
        TypeError: an argument is of another type.
        ValueError: one is out of its range.
        RuntimeError: from ``update``: ``fused=True`` where there is no kernel; the message says why.

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
    return elementwise(
        ScaleByAdamState,
        partial(_init, moment_requires_grad),
        partial(adam, b1=b1, b2=b2, eps=eps, eps_root=eps_root, fused=fused),
    )


def _init(requires_grad: bool, params: Params, /) -> ScaleByAdamState:
    return ScaleByAdamState(
        filled(params, requires_grad=requires_grad),
        filled(params, requires_grad=requires_grad),
        counts(params),
    )
