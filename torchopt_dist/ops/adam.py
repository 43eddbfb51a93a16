"""Gradients, Adam's two averages → updates and new averages; or, in place, → moved parameters.

With the gradient ``g`` at a tensor's step ``t``, ``m = b1 * m + (1 - b1) * g`` and ``v = b2 * v + (1 - b2) * g**2``,
and the direction is ``m / (1 - b1**t) / (sqrt(v / (1 - b2**t) + eps_root) + eps)``. [Kingma and Ba 2015, Adam: A
Method for Stochastic Optimization, algorithm 1; ``eps_root`` as in optax.]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchopt_dist.ops import library, lists
from torchopt_dist.ops.lists import Factor

__all__ = ["adam", "adam_"]


def adam(
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    *,
    b1: Factor,
    b2: Factor,
    eps: Factor,
    eps_root: Factor,
    fused: bool | None = None,
    inplace: bool,
) -> tuple[list[Tensor], ...]:
    """The directions and the next state; differentiable to any order, in ``eps`` and the decays too.

    Args:
        grads: real tensors of any shapes; so are ``exp_avgs`` (``m``) and ``exp_avg_sqs`` (``v``).
        exp_avgs: averages of the gradients.
        exp_avg_sqs: averages of their squares.
        steps: steps made so far: 0-d float tensors on the CPU.
        b1: decay of ``exp_avgs``.
        b2: decay of ``exp_avg_sqs``.
        eps: added to the root.
        eps_root: added below the root. With 0, the root's derivative at 0 is taken to be 0, which is the limit as
            the gradient goes to 0.
        fused: None uses a kernel where there is one and it helps, False uses this formula, True demands the kernel.
        inplace: overwrite ``exp_avgs``, ``exp_avg_sqs`` and ``steps``.

    Returns:
        Directions, ``exp_avgs``, ``exp_avg_sqs``, ``steps``.

    Raises:
        RuntimeError: ``fused=True`` where there is no kernel; the message says why.
    """
    if fused:
        library.require("adam", grads)
    steps = lists.add_number(steps, 1, inplace=inplace)
    exp_avgs = lists.interpolate(exp_avgs, grads, 1 - b1, inplace=inplace)
    exp_avg_sqs = lists.multiply(exp_avg_sqs, b2, inplace=inplace)
    exp_avg_sqs = lists.add_product(exp_avg_sqs, grads, grads, 1 - b2, inplace=inplace)

    # Both sides of the fraction times 1 - b1**t, so that only one of them is scaled.
    left1, left2 = lists.bias_correction(b1, steps), lists.bias_correction(b2, steps)
    below = exp_avg_sqs
    if isinstance(eps_root, Tensor) or eps_root != 0:
        below = lists.add_number(below, lists.combine(_times, left2, eps_root))
    roots = lists.square_root(below)
    overwrite = not torch.is_grad_enabled()  # what was made here is nobody else's
    roots = lists.multiply(roots, lists.combine(_over_root, left1, left2), inplace=overwrite)
    roots = lists.add_number(roots, lists.combine(_times, left1, eps), inplace=overwrite)
    return lists.divide(exp_avgs, roots), exp_avgs, exp_avg_sqs, steps


def _times(x: Factor, y: Factor) -> Factor:
    return x * y


def _over_root(x: Factor, y: Factor) -> Factor:
    return x / y**0.5


def adam_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: float,
    b1: float,
    b2: float,
    eps: float,
    eps_root: float,
    weight_decay: float,
    decoupled: bool,
    maximize: bool,
    fused: bool | None = None,
) -> None:
    """A whole step of Adam or AdamW in place: ``params``, ``exp_avgs``, ``exp_avg_sqs`` and ``steps`` are overwritten.

    It records no graph. The numbers are those of ``torch.optim.Adam(foreach=True)``, rounding included.

    Args:
        params: real tensors of any shapes.
        grads: as many, of the same shapes.
        exp_avgs: as in :func:`adam`.
        exp_avg_sqs: as in :func:`adam`.
        steps: as in :func:`adam`.
        lr: learning rate.
        b1: as in :func:`adam`.
        b2: as in :func:`adam`.
        eps: as in :func:`adam`.
        eps_root: as in :func:`adam`.
        weight_decay: how much of a parameter is added to its gradient; or, if ``decoupled``, ``lr`` times which is
            taken off the parameter.
        decoupled: AdamW's weight decay.
        maximize: go up, not down.
        fused: as in :func:`adam`.

    Raises:
        RuntimeError: as in :func:`adam`.
    """
    if fused:
        library.require("adam_", params)
    for part in lists.portions(params):
        p, g, m, v, t = (list(tensors[part]) for tensors in (params, grads, exp_avgs, exp_avg_sqs, steps))
        if maximize:
            g = lists.multiply(g, -1)
        if weight_decay != 0 and not decoupled:
            g = lists.add(g, p, weight_decay)
        elif weight_decay != 0:
            lists.multiply(p, 1 - lr * weight_decay, inplace=True)
        lists.add_number(t, 1, inplace=True)
        lists.interpolate(m, g, 1 - b1, inplace=True)
        lists.multiply(v, b2, inplace=True)
        lists.add_product(v, g, g, 1 - b2, inplace=True)
        left1, left2 = lists.bias_correction(b1, t), lists.bias_correction(b2, t)
        below = v if eps_root == 0 else lists.add_number(v, lists.combine(_times, left2, eps_root))
        roots = lists.square_root(below)
        lists.divide_(roots, lists.combine(_root, left2))
        lists.add_number(roots, eps, inplace=True)
        lists.add_quotient_(p, m, roots, lists.combine(lambda left: -(lr / left), left1))


def _root(x: Factor) -> Factor:
    return x**0.5
