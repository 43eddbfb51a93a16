"""Gradients of the results of a step of Adam → of what it was made of, over the memory of the former, by one kernel.

It stays beside :func:`~torchopt_dist.ops._adam.adam` with ``bars``, which makes new tensors, for what it spares a
replay. That is three tensors of the parameters' size: at most there are 16 instead of 19 with one snapshot, and 25
instead of 28 with four. And it is time: 5 % at a width of 64, up to 4 % at 256, 8 to 15 % at 700, 9 % with a million
parameters in two layers; where the learning rate is learned, 9 to 19, up to 7, and 9 to 14 % of the first, the second
and the last of these.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchopt_dist.ops import _bias_correction as bias_correction
from torchopt_dist.ops import _dispatch as dispatch
from torchopt_dist.ops._adam import corrections_of
from torchopt_dist.ops._columns import flatten

__all__ = ["adam_backward_"]


def adam_backward_(
    moved_grads: list[Tensor],
    exp_avg_grads: list[Tensor],
    exp_avg_sq_grads: list[Tensor],
    *,
    to_grads: list[Tensor],
    terms: list[Tensor] | None,
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: Sequence[Tensor],
    params: list[Tensor],
    lr: float,
    b1: float,
    b2: float,
    eps: float,
    eps_root: float = 0.0,
    weight_decay: float = 0.0,
    decoupled: bool = False,
    maximize: bool = False,
    fused: bool | None = None,
) -> Tensor | None:
    """Go back through a step of Adam or AdamW; see :func:`~torchopt_dist.ops._adam.adam` for what is not said here.

    Args:
        moved_grads: gradients of the moved parameters; overwritten by those of the parameters.
        exp_avg_grads: of the next ``exp_avgs``; overwritten by those of ``exp_avgs``.
        exp_avg_sq_grads: of the next ``exp_avg_sqs``; overwritten by those of ``exp_avg_sqs``.
        to_grads: tensors of the same shapes; overwritten by the gradients of ``grads``.
        terms: tensors of the same shapes to compute in, if the gradient of ``lr`` is asked for.
        grads: the gradients that the step was made of.
        exp_avgs: the averages before the step.
        exp_avg_sqs: the averages of squares before the step.
        steps: how many steps there were before, for each parameter.
        params: the parameters before the step.
        lr: learning rate, at least 0; this and all others as in :func:`~torchopt_dist.ops._adam.adam_`.
        b1: decay of the averages, in [0, 1).
        b2: decay of the averages of squares, in [0, 1).
        eps: added to the root.
        eps_root: added inside the root.
        weight_decay: factor of the parameters.
        decoupled: whether weight decay moves the parameters by itself, as in AdamW.
        maximize: whether the step ascends.
        fused: None and True use the kernel where there is one; False never does.

    Returns:
        The gradient of ``lr``, 0-d, or 0 where it is not asked for; ``None`` where there is no kernel: then nothing is
        overwritten. That is so for weight decay that is not decoupled, and for half precision, too, in which sums
        of terms would not be exact enough.
    """
    written = [moved_grads, exp_avg_grads, exp_avg_sq_grads, to_grads, *([] if terms is None else [terms])]
    rest = flatten([*written, exp_avgs, exp_avg_sqs, params])[1]
    if (
        (weight_decay != 0 and not decoupled)
        or {x.dtype for x in grads} - {torch.float32, torch.float64}
        or not dispatch.use_kernel("adam_backward_", grads, rest, None if fused else fused)
    ):
        return None
    of_first, of_second = bias_correction.bias_corrections((b1, b2), steps, ahead=1)
    torch.ops.todist.adam_backward_(
        to_grads,
        terms or [],
        exp_avg_grads,
        exp_avg_sq_grads,
        moved_grads,
        grads,
        exp_avgs,
        exp_avg_sqs,
        corrections_of(of_first, of_second, len(grads)),
        -lr,
        b1,
        b2,
        eps,
        eps_root,
        maximize,
    )
    of_lr = torch.zeros((), dtype=torch.float64, device=moved_grads[0].device)
    for place, term in enumerate(terms or []):
        of_lr -= term.sum()
        if weight_decay != 0:
            of_lr -= weight_decay * torch.sum(torch.mul(moved_grads[place], params[place], out=term))
    if weight_decay != 0:
        torch._foreach_mul_(moved_grads, 1 - lr * weight_decay)
    torch.autograd.graph.increment_version([x for column in written for x in column])
    return of_lr
