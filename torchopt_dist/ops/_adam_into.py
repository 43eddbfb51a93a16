"""Parameters, gradients, Adam's averages → the next parameters and averages, in memory that is there, by one kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from torchopt_dist.ops import _bias_correction as bias_correction
from torchopt_dist.ops import _dispatch as dispatch
from torchopt_dist.ops._adam import corrections_of
from torchopt_dist.ops._columns import flatten

__all__ = ["adam_into_"]


def adam_into_(
    new_params: list[Tensor],
    new_exp_avgs: list[Tensor],
    new_exp_avg_sqs: list[Tensor],
    new_steps: list[Tensor],
    *,
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    lr: float,
    b1: float,
    b2: float,
    eps: float,
    eps_root: float = 0.0,
    weight_decay: float = 0.0,
    decoupled: bool = False,
    maximize: bool = False,
    fused: bool | None = None,
) -> bool:
    """Make a step of Adam or AdamW, without a graph; see :func:`~torchopt_dist.ops._adam.adam_` for what is not said.

    Args:
        new_params: tensors like ``params``, which are overwritten by the moved ones.
        new_exp_avgs: overwritten by the next averages.
        new_exp_avg_sqs: overwritten by the next averages of squares.
        new_steps: overwritten by the next counts.
        params: the parameters, which stay as they are; so do the next four.
        grads: the gradients.
        exp_avgs: the averages before the step.
        exp_avg_sqs: the averages of squares before the step.
        steps: how many steps there were before, for each parameter.
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
        Whether the step is made; without a kernel for these tensors nothing is.
    """
    written = [new_params, new_exp_avgs, new_exp_avg_sqs]
    rest = flatten([*written, exp_avgs, exp_avg_sqs, params])[1]
    if not dispatch.use_kernel("adam_into_", grads, rest, None if fused else fused):
        return False
    of_first, of_second = bias_correction.bias_corrections((b1, b2), steps, ahead=1)
    torch.ops.todist.adam_into_(
        *written,
        grads,
        exp_avgs,
        exp_avg_sqs,
        params,
        corrections_of(of_first, of_second, len(grads)),
        -lr,
        1 - lr * weight_decay if decoupled else 1.0,
        b1,
        b2,
        eps,
        eps_root,
        0.0 if decoupled else weight_decay,
        maximize,
    )
    torch.autograd.graph.increment_version([x for column in written for x in column])
    torch._foreach_copy_(new_steps, steps)
    bias_correction.count_up_(new_steps)
    return True
