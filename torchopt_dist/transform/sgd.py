"""Gradients → updates by stochastic gradient descent, with momentum."""

from __future__ import annotations

from typing import Any

from torchopt_dist.core.types import ScalarOrSchedule
from torchopt_dist.ops._sgd import sgd as sgd_op
from torchopt_dist.ops._sgd import sgd_
from torchopt_dist.transform._fused_step import fused_step
from torchopt_dist.transform._hyperparameters import HyperParameter, is_number, is_zero
from torchopt_dist.transform._texts import documented
from torchopt_dist.transform.add_decayed_weights import penalized
from torchopt_dist.transform.base import ChainedGradientTransformation, GradientTransformation
from torchopt_dist.transform.scale import scale_by_learning_rate
from torchopt_dist.transform.trace import TraceState, check_momentum, trace

__all__ = ["sgd"]


@documented
def sgd(
    lr: ScalarOrSchedule = 1e-3,
    momentum: HyperParameter = 0.0,
    dampening: HyperParameter = 0.0,
    weight_decay: HyperParameter = 0.0,
    nesterov: bool = False,
    *,
    moment_requires_grad: bool = False,
    maximize: bool = False,
    fused: bool | None = None,
) -> GradientTransformation:
    """Stochastic gradient descent, as ``torch.optim.SGD``.

    ``p - lr * b``, where ``b`` is the running sum of the gradients (see
    :func:`~torchopt_dist.transform.trace`), and the gradient itself without momentum.

    Args:
        lr: learning rate.
        momentum: how much of the running sum of gradients stays, at least 0; a number or a tensor of one
            element.
        dampening: how much of a gradient is left out of the running sum, from the second one on; a number or a tensor
            of one element.
        weight_decay: L2 penalty.
        nesterov: look ahead along the running sum [Sutskever et al. 2013]; needs a momentum and no dampening.
        moment_requires_grad: leaves at the start.
        maximize: maximize the objective.
        fused: ``None`` uses a kernel where there is one and it helps, ``False`` never uses one, ``True`` raises an
            error where there is none. The kernel takes hyper-parameters that are numbers, and makes whole steps:
            ``update`` alone is sums of tensors, and has no kernel.

    Raises:
        ValueError: ``nesterov`` comes without a momentum or with dampening.
        RuntimeError: ``fused=True`` with a hyper-parameter that is a tensor or a schedule; or, at a step, where there
            is no kernel; the message says why.

    Example:
        >>> import torch
        >>> w = torch.tensor([1.0, -2.0])
        >>> impl = sgd(lr=0.1, momentum=0.9)
        >>> impl.update(2 * w, impl.init(w), params=w)[0]
        tensor([-0.2000,  0.4000])
    """
    check_momentum(momentum, dampening, nesterov)
    if fused and not is_number(lr, momentum, dampening, weight_decay):
        raise RuntimeError(
            "`fused=True` cannot be used: the kernel takes hyper-parameters that are numbers; leave `fused` out"
        )
    links = penalized(weight_decay, maximize)
    if not is_zero(momentum):
        links.append(trace(momentum, dampening, nesterov, moment_requires_grad))
    options: dict[str, Any] = {
        "lr": lr,
        "momentum": momentum,
        "dampening": dampening,
        "nesterov": nesterov,
        "weight_decay": weight_decay,
        "maximize": maximize,
        "fused": fused,
    }
    only_adds = not fused and not maximize and is_zero(momentum) and is_zero(weight_decay)
    kind = None if is_zero(momentum) else TraceState
    whole = fused_step(sgd_, sgd_op, kind, only_adds=only_adds and isinstance(lr, (int, float)), **options)
    return ChainedGradientTransformation(*links, scale_by_learning_rate(lr), fused_step=whole)
