"""Gradients → updates by LAMB: Adam's, each times the ratio of its parameter's norm to its own."""

from __future__ import annotations

import torch
from torch import Tensor

from torchopt_dist.core.types import ScalarOrSchedule
from torchopt_dist.transform._elementwise import on_leaves
from torchopt_dist.transform._hyperparameters import HyperParameter, check_decays
from torchopt_dist.transform._texts import documented
from torchopt_dist.transform.adam import scale_by_adam
from torchopt_dist.transform.add_decayed_weights import add_decayed_weights, penalized
from torchopt_dist.transform.base import GradientTransformation, chain, stateless
from torchopt_dist.transform.masked import Mask
from torchopt_dist.transform.scale import scale_by_learning_rate

__all__ = ["lamb", "scale_by_trust_ratio"]


@documented
def scale_by_trust_ratio() -> GradientTransformation:
    """Multiply each leaf ``u`` by ``|p| / |u|``, Euclidean norms, ``p`` its parameter; by 1 where a norm is 0.

    [You et al. 2020, Large Batch Optimization for Deep Learning: Training BERT in 76 minutes, section 3, with the
    identity for the function that scales the norm.] The derivative of a norm at 0 is taken to be 0.

    Raises:
        ValueError: from ``update``: ``params`` are missing, or their structure differs.
        TypeError: from ``update``: an update is sparse.

    Example:
        >>> import torch
        >>> w = torch.tensor([3.0, 4.0])
        >>> impl = scale_by_trust_ratio()
        >>> impl.update(torch.tensor([1.0, 0.0]), impl.init(w), params=w)[0]
        tensor([5., 0.])
    """
    return GradientTransformation(stateless, _update)


@on_leaves(params="a trust ratio needs the parameters")
def _update(params: list[Tensor], updates: list[Tensor]) -> list[Tensor]:
    return [_scaled(u, p) for u, p in zip(updates, params, strict=True)]


def _scaled(update: Tensor, param: Tensor) -> Tensor:
    above, below = _norm(param), _norm(update)
    usable = (above > 0) & (below > 0)
    ratio = torch.where(usable, above / torch.where(usable, below, 1.0), 1.0)
    return (update * ratio).to(update.dtype)


def _norm(x: Tensor) -> Tensor:
    """The Euclidean norm, in float32 for half precision; with a derivative of 0 at 0."""
    real = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    real = real.float() if real.dtype in (torch.float16, torch.bfloat16) else real
    total = real.square().sum()
    there = total > 0
    return torch.where(there, torch.where(there, total, 1.0).sqrt(), 0.0)


@documented
def lamb(
    lr: ScalarOrSchedule = 1e-3,
    betas: tuple[HyperParameter, HyperParameter] = (0.9, 0.999),
    eps: HyperParameter = 1e-6,
    weight_decay: HyperParameter = 0.0,
    *,
    mask: Mask = None,
    moment_requires_grad: bool = False,
    maximize: bool = False,
) -> GradientTransformation:
    """LAMB, for large batches: ``p - lr * |p| / |u| * u`` for each parameter, with ``u = d + weight_decay * p``.

    ``d`` is Adam's direction, of :func:`~torchopt_dist.transform.scale_by_adam`; where a norm is 0 the ratio is 1.

    [You et al. 2020, Large Batch Optimization for Deep Learning: Training BERT in 76 minutes, algorithm 2.]

    Args:
        lr: learning rate.
        betas: decays of the averages of the gradients and of their squares.
        eps: added to the denominator.
        weight_decay: how much of a parameter is added to its direction, at least 0; a number or a tensor of one
            element.
        mask: which parameters decay.
        moment_requires_grad: leaves at the start.
        maximize: maximize the objective.

    Example:
        >>> import torch
        >>> w = torch.tensor([3.0, -4.0])
        >>> impl = lamb(lr=0.1, eps=0.0)
        >>> impl.update(2 * w, impl.init(w), params=w)[0]  # the direction (1, -1) gets the norm 5
        tensor([-0.3536,  0.3536])
    """
    check_decays("betas", betas, 2)
    return chain(
        *penalized(0.0, maximize),
        scale_by_adam(*betas, eps, moment_requires_grad=moment_requires_grad),
        add_decayed_weights(weight_decay, mask),
        scale_by_trust_ratio(),
        scale_by_learning_rate(lr),
    )
