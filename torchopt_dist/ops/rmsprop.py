"""Gradients, averages of their squares → directions and new averages; or a whole step of RMSprop, in place.

With the gradient ``g``, ``v = alpha * v + (1 - alpha) * g**2``, and the direction is ``g / (sqrt(v) + eps)``; centered,
also ``a = alpha * a + (1 - alpha) * g``, and the root is that of ``v - a**2``. [Tieleman and Hinton 2012, Neural
Networks for Machine Learning, lecture 6.5; centered: Graves 2013, Generating Sequences With Recurrent Neural
Networks, equations 38 to 45.] The root's derivative at 0 is taken to be 0, the limit as the gradient goes to 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchopt_dist.ops import choice, lists, table
from torchopt_dist.ops.lists import Factor

__all__ = ["rmsprop", "rmsprop_"]


def rmsprop(
    grads: list[Tensor],
    square_avgs: list[Tensor],
    grad_avgs: list[Tensor] | None = None,
    *,
    alpha: Factor,
    eps: Factor,
    fused: bool | None = None,
    inplace: bool = False,
) -> tuple[list[Tensor], ...]:
    """The directions and the next averages; differentiable to any order, in ``alpha`` and ``eps`` too.

    Args:
        grads: real tensors of any shapes; so are ``square_avgs`` (``v``) and ``grad_avgs`` (``a``).
        square_avgs: averages of the squared gradients.
        grad_avgs: averages of the gradients; ``None`` unless centered.
        alpha: decay of the averages; a number, or a tensor of one element.
        eps: added to the root; likewise.
        fused: None uses a kernel where there is one, False the formulas here, True demands the kernel, which has no
            derivatives for hyper-parameters that are tensors.
        inplace: leave to overwrite the averages.

    Returns:
        Directions, ``square_avgs``, and ``grad_avgs`` if centered.

    Raises:
        RuntimeError: ``fused=True`` where there is no kernel for these arguments; the message says why.
    """
    columns = [grads, square_avgs, *([] if grad_avgs is None else [grad_avgs])]
    kernel = choice.use_kernel("rmsprop", grads, table.join(columns[1:]), fused)
    numbers = not (isinstance(alpha, Tensor) or isinstance(eps, Tensor))
    if fused and not numbers:
        raise RuntimeError("`fused=True` cannot be kept: the kernel takes hyper-parameters that are numbers")
    if not (kernel and numbers):
        return _formula(columns, alpha, eps, inplace)
    if torch.is_grad_enabled() and any(x.requires_grad for column in columns for x in column):
        apply: Callable[..., tuple[Tensor, ...]] = _RMSprop.apply
        made: Sequence[Tensor] = apply(alpha, eps, len(columns), *table.join(columns))
    else:
        made = _kernel(columns, alpha, eps)
    return tuple(table.split(made, len(columns)))


def _formula(
    columns: Sequence[list[Tensor]], alpha: Factor, eps: Factor, inplace: bool = False
) -> tuple[list[Tensor], ...]:
    """The reference: what the rest of this file computes is measured against it."""
    grads, square_avgs, *grad_avgs = columns
    square_avgs = lists.multiply(square_avgs, alpha, inplace=inplace)
    square_avgs = lists.add_product(square_avgs, grads, grads, 1 - alpha, inplace=inplace)
    below = square_avgs
    if grad_avgs:
        grad_avgs = [lists.interpolate(grad_avgs[0], grads, 1 - alpha, inplace=inplace)]
        below = lists.add_product(below, grad_avgs[0], grad_avgs[0], -1.0)
    roots = lists.square_root(below)
    return lists.divide(grads, lists.add_number(roots, eps)), square_avgs, *grad_avgs


class _RMSprop(torch.autograd.Function):
    """The whole list as one node, by the kernels; what is to be differentiated again, by the formula."""

    @staticmethod
    def forward(ctx: Any, alpha: float, eps: float, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        columns = table.split(tensors, count)
        made = _kernel(columns, alpha, eps)
        ctx.alpha, ctx.eps, ctx.count = alpha, eps, count
        ctx.save_for_backward(*tensors, *made[len(columns[0]) :])
        ctx.set_materialize_grads(False)
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *output_grads: Tensor | None) -> tuple[Tensor | None, ...]:
        columns = table.split(ctx.saved_tensors, 2 * ctx.count - 1)
        inputs, averages = columns[: ctx.count], columns[ctx.count :]
        if torch.is_grad_enabled():
            leaves = table.join(inputs)
            wanted = [x for x in leaves if x.requires_grad]
            made = table.join(_formula(inputs, ctx.alpha, ctx.eps))
            known = [
                (x, g) for x, g in zip(made, output_grads, strict=True) if g is not None and x.requires_grad
            ]
            found = torch.autograd.grad(
                [x for x, _ in known], wanted, [g for _, g in known], create_graph=True, allow_unused=True
            )
            rest = iter(found)
            return None, None, None, *(next(rest) if x.requires_grad else None for x in leaves)
        flows = zip(table.split(output_grads, ctx.count), inputs, strict=True)
        first, *outer = [table.without_gaps(column, like) or [] for column, like in flows]
        first = first or [torch.zeros_like(g) for g in inputs[0]]
        squares, *means = averages
        made = torch.ops.todist.rmsprop_backward(
            first, *outer, *([] if means else [[]]), inputs[0], squares, *(means or [[]]), ctx.alpha, ctx.eps
        )
        return None, None, None, *made


def _kernel(columns: Sequence[list[Tensor]], alpha: Factor, eps: Factor) -> list[Tensor]:
    grads, square_avgs, *grad_avgs = columns
    made: list[Tensor] = torch.ops.todist.rmsprop(grads, square_avgs, *(grad_avgs or [[]]), alpha, eps)
    return made


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
    if choice.use_kernel("rmsprop_", params, table.join(columns[1:]), fused):
        numbers = (lr, alpha, eps, momentum, nesterov, weight_decay, maximize)
        torch.ops.todist.rmsprop_(*map(list, columns), *numbers)
        torch.autograd.graph.increment_version([*params, *square_avgs, *grad_avgs, *momentum_buffers])
        return
    for part in table.portions(params):
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
