"""Parameters, gradients, running sums → a whole step of stochastic gradient descent, in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchopt_dist.ops import choice, lists

__all__ = ["sgd_"]


def sgd_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor] = (),
    steps: Sequence[Tensor] = (),
    *,
    lr: float,
    momentum: float,
    dampening: float,
    nesterov: bool,
    weight_decay: float,
    maximize: bool,
    fused: bool | None = None,
) -> None:
    """Overwrite ``params``, ``momentum_buffers`` and ``steps``.

    It records no graph. The numbers are those of ``torch.optim.SGD(foreach=True)``, rounding included for the formula.

    Args:
        params: tensors of any shapes.
        grads: as many, of the same shapes.
        momentum_buffers: their running sums; none where ``momentum`` is 0.
        steps: how many gradients each has had, 0-d; none where ``dampening`` is 0.
        lr: learning rate.
        momentum: how much of a running sum stays.
        dampening: how much of a gradient is left out of it, from the second one on.
        nesterov: look ahead.
        weight_decay: how much of a parameter is added to its gradient.
        maximize: go up, not down.
        fused: None uses a kernel where there is one, False the formula, True demands the kernel.

    Raises:
        RuntimeError: ``fused=True`` where there is no kernel for these arguments; the message says why.
    """
    if choice.use_kernel("sgd_", params, [*grads, *momentum_buffers], fused):
        taken = _taken(list(steps), momentum, dampening, len(params))
        columns = (list(params), list(grads), list(momentum_buffers))
        torch.ops.todist.sgd_(*columns, taken, lr, momentum, nesterov, weight_decay, maximize)
        torch.autograd.graph.increment_version([*params, *momentum_buffers])
        return
    for part in lists.portions(params):
        p, g = list(params[part]), list(grads[part])
        if maximize:
            g = lists.multiply(g, -1)
        if weight_decay != 0:
            g = lists.add(g, p, weight_decay)
        if momentum != 0:
            sums = list(momentum_buffers[part])
            _sum_up_(sums, g, list(steps[part]), momentum, dampening)
            g = lists.add(g, sums, momentum) if nesterov else sums
        lists.add(p, g, -lr, inplace=True)


def _taken(steps: list[Tensor], momentum: float, dampening: float, count: int) -> Tensor:
    """How much of each gradient goes into the running sum: all of the first one. The steps are counted."""
    if momentum == 0:
        return torch.empty(0, dtype=torch.float64, device="cpu")
    if dampening == 0:
        return torch.ones(count, dtype=torch.float64, device="cpu")
    before = lists.values(steps)
    lists.count_up_(steps)
    counts = before if isinstance(before, list) else [before] * count
    taken = [1 - dampening if seen else 1.0 for seen in counts]
    return torch.tensor(taken, dtype=torch.float64, device="cpu")


def _sum_up_(
    sums: list[Tensor], grads: list[Tensor], steps: list[Tensor], momentum: float, dampening: float
) -> None:
    lists.multiply(sums, momentum, inplace=True)
    if dampening == 0:
        lists.add(sums, grads, inplace=True)
        return
    before = lists.values(steps)
    lists.count_up_(steps)
    if not isinstance(before, list):
        lists.add(sums, grads, 1 - dampening if before else 1.0, inplace=True)
        return
    for total, grad, count in zip(sums, grads, before, strict=True):
        total.add_(grad, alpha=1 - dampening if count else 1.0)
