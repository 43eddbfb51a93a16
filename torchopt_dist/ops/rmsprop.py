"""Parameters, gradients, averages → a whole step of RMSprop, in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchopt_dist.ops import choice, lists

__all__ = ["rmsprop_"]


def rmsprop_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    square_avgs: Sequence[Tensor],
    grad_avgs: Sequence[Tensor] = (),
    momentum_buffers: Sequence[Tensor] = (),
    *,
    lr: float,
    alpha: float,
    eps: float,
    momentum: float,
    nesterov: bool,
    weight_decay: float,
    maximize: bool,
    fused: bool | None = None,
) -> None:
    """Overwrite ``params`` and the state.

    It records no graph. The numbers are those of ``torch.optim.RMSprop(foreach=True)`` to rounding.

    Args:
        params: real tensors of any shapes.
        grads: as many, of the same shapes.
        square_avgs: running averages of the squared gradients.
        grad_avgs: running averages of the gradients; none unless centered.
        momentum_buffers: running sums of the steps; none where ``momentum`` is 0.
        lr: learning rate.
        alpha: decay of the averages.
        eps: added to the denominator.
        momentum: how much of a running sum stays.
        nesterov: look ahead.
        weight_decay: how much of a parameter is added to its gradient.
        maximize: go up, not down.
        fused: None uses a kernel where there is one, False the formula, True demands the kernel.

    Raises:
        RuntimeError: ``fused=True`` where there is no kernel for these arguments; the message says why.
    """
    columns = (params, grads, square_avgs, grad_avgs, momentum_buffers)
    if choice.use_kernel("rmsprop_", [x for column in columns for x in column], fused):
        numbers = (lr, alpha, eps, momentum, nesterov, weight_decay, maximize)
        torch.ops.todist.rmsprop_(*map(list, columns), *numbers)
        torch.autograd.graph.increment_version([*params, *square_avgs, *grad_avgs, *momentum_buffers])
        return
    for part in lists.portions(params):
        p, g, v, a, b = (list(column[part]) for column in columns)
        if maximize:
            g = lists.multiply(g, -1)
        if weight_decay != 0:
            g = lists.add(g, p, weight_decay)
        lists.multiply(v, alpha, inplace=True)
        lists.add_product(v, g, g, 1 - alpha, inplace=True)
        below = v
        if a:
            lists.interpolate(a, g, 1 - alpha, inplace=True)
            below = lists.add_product(v, a, a, -1.0)
        roots = lists.square_root(below)
        lists.add_number(roots, eps, inplace=True)
        if not b:
            lists.add_quotient_(p, g, roots, -lr)
            continue
        lists.multiply(b, momentum, inplace=True)
        lists.add_quotient_(b, g, roots, 1.0)
        if nesterov:
            lists.add_quotient_(p, g, roots, -lr)
        lists.add(p, b, -lr * momentum if nesterov else -lr, inplace=True)
