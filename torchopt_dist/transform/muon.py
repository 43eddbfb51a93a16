"""Gradients of matrices → updates by Muon: orthogonalized momentum."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchopt_dist import pytree
from torchopt_dist.core.types import Params, ScalarOrSchedule
from torchopt_dist.ops import _foreach as foreach
from torchopt_dist.ops._columns import present
from torchopt_dist.transform._elementwise import elementwise, on_leaves
from torchopt_dist.transform._hyperparameters import HyperParameter, check_at_least_zero, check_decay
from torchopt_dist.transform._texts import documented
from torchopt_dist.transform.add_decayed_weights import add_decayed_weights, penalized
from torchopt_dist.transform.base import EmptyState, GradientTransformation, chain
from torchopt_dist.transform.scale import scale_by_learning_rate
from torchopt_dist.transform.trace import TraceState, first_trace

__all__ = ["muon", "orthogonalize"]


_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


_ADJUSTMENTS = (None, "original", "match_rms_adamw")


@documented
def orthogonalize(
    ns_coefficients: Sequence[float] = _COEFFICIENTS,
    ns_steps: int = 5,
    eps: float = 1e-7,
    adjust_lr_fn: str | None = None,
) -> GradientTransformation:
    """Muon's direction: each matrix ``X`` made nearly orthogonal, times a factor for its shape.

    It starts from ``X / max(|X|, eps)``, with the Frobenius norm, and computes ``X = a X + (b A + c A^2) X`` with ``A =
    X X^T`` ``ns_steps`` times; a matrix with more rows than columns is transposed for that. With the default
    coefficients five steps take singular values to about 0.7 to 1.2; ``(2, -1.5, 0.5)`` converges to 1, in more steps.
    [Jordan et al. 2024, Muon: An optimizer for hidden layers in neural networks.] It computes in the matrix's own
    dtype, and in float32 for half precision, where ``torch.optim.Muon`` computes in bfloat16; so derivatives are those
    of the values.

    Args:
        ns_coefficients: three numbers ``a``, ``b``, ``c``.
        ns_steps: how many iterations, at least 1.
        eps: the smallest norm by which a matrix is divided, at least 0.
        adjust_lr_fn: the factor, for a matrix of ``r`` rows and ``c`` columns: ``'original'``, the default,
            ``sqrt(max(1, r / c))``; ``'match_rms_adamw'``: ``0.2 * sqrt(max(r, c))``, which fits Adam's learning rates
            [Liu et al. 2025, Muon is Scalable for LLM Training].

    Raises:
        TypeError: from ``init``: a leaf is a complex matrix.
        ValueError: from ``init``: a leaf has not two dimensions.

    Example:
        >>> import torch
        >>> w = torch.tensor([[3.0, 0.0], [0.0, 1.0]])
        >>> impl = orthogonalize((2.0, -1.5, 0.5), ns_steps=10)
        >>> impl.update(w, impl.init(w))[0].round(decimals=3)
        tensor([[1., 0.],
                [0., 1.]])
    """
    if not isinstance(ns_coefficients, (tuple, list)) or len(ns_coefficients) != 3:
        raise TypeError(f"`ns_coefficients` must be a tuple of 3 numbers, got {ns_coefficients!r:.80}")
    if not all(isinstance(number, numbers.Real) for number in ns_coefficients):
        raise TypeError(f"`ns_coefficients` must be numbers, got {ns_coefficients!r:.80}")
    if not isinstance(ns_steps, int) or isinstance(ns_steps, bool):
        raise TypeError(f"`ns_steps` must be an int, got {type(ns_steps).__name__}")
    if ns_steps < 1:
        raise ValueError(f"`ns_steps` must be at least 1, got {ns_steps}")
    check_at_least_zero("eps", eps)
    if adjust_lr_fn not in _ADJUSTMENTS:
        raise ValueError(f"`adjust_lr_fn` must be one of {_ADJUSTMENTS}, got {adjust_lr_fn!r}")
    return GradientTransformation(
        _init, partial(_update, tuple(ns_coefficients), ns_steps, float(eps), adjust_lr_fn or "original")
    )


def _init(params: Params, /) -> EmptyState:
    leaves = pytree.flatten(params)[0]
    for place in present(leaves):
        leaf: Any = leaves[place]
        if leaf.ndim != 2:
            raise ValueError(
                f"`params` must be matrices to be orthogonalized, got shape {tuple(leaf.shape)} at leaf {place}: give "
                "the others to another optimizer, by `partition({'matrix': muon(...), 'other': adamw(...)}, labels)`"
            )
        if leaf.is_complex():
            raise TypeError(f"`params` must be real to be orthogonalized, got {leaf.dtype} at leaf {place}")
    return EmptyState()


@on_leaves()
def _update(
    coefficients: tuple[float, float, float], steps: int, eps: float, adjustment: str, updates: list[Tensor]
) -> list[Tensor]:
    return [_orthogonal(x, coefficients, steps, eps) * _factor(x, adjustment) for x in updates]


def _factor(x: Tensor, adjustment: str) -> float:
    rows, columns = x.shape
    if adjustment == "original":
        return math.sqrt(max(1.0, rows / max(columns, 1)))
    return 0.2 * math.sqrt(max(rows, columns))


def _orthogonal(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    a, b, c = coefficients
    x = matrix.float() if matrix.dtype in (torch.float16, torch.bfloat16) else matrix
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = _normalized(x, eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if tall else x).to(matrix.dtype)


def _normalized(x: Tensor, least: float) -> Tensor:
    """``x / max(|x|, least)`` with the Frobenius norm, of any finite matrix; zeros stay zeros."""
    if not x.numel():
        return x
    tiny = torch.finfo(x.dtype).tiny
    # Divided by its largest entry, a matrix has squares that neither underflow nor overflow.
    largest = x.detach().abs().amax().clamp(min=tiny)
    scaled = x / largest
    total = scaled.square().sum()
    there = total > (least / largest).square()
    return torch.where(there, scaled / torch.where(there, total, 1.0).sqrt(), x / max(least, tiny))


@documented
def muon(
    lr: ScalarOrSchedule = 1e-3,
    weight_decay: HyperParameter = 0.1,
    momentum: HyperParameter = 0.95,
    nesterov: bool = True,
    ns_coefficients: Sequence[float] = (3.4445, -4.7750, 2.0315),
    eps: float = 1e-7,
    ns_steps: int = 5,
    adjust_lr_fn: str | None = None,
    *,
    moment_requires_grad: bool = False,
    maximize: bool = False,
) -> GradientTransformation:
    """Muon, as ``torch.optim.Muon``: orthogonalized momentum, for matrices only.

    With ``m = momentum * m + (1 - momentum) * g`` and ``u = (1 - momentum) * g + momentum * m`` (``u = m`` without
    Nesterov's look-ahead), ``p - lr * (factor * O(u) + weight_decay * p)``, where factor and ``O`` are those of
    :func:`~torchopt_dist.transform.orthogonalize`; the factor is not on the weight decay.

    For the parameters of a model that are not matrices, and for embeddings and the last layer, use another optimizer:
    :func:`~torchopt_dist.transform.partition` splits the parameters between several.

    [Jordan et al. 2024, Muon: An optimizer for hidden layers in neural networks.]

    Args:
        lr: learning rate.
        weight_decay: decoupled.
        momentum: decay of the running average of the gradients, at least 0 and below 1; a number or a tensor of one
            element.
        nesterov: use Nesterov's look-ahead.
        ns_coefficients: the three coefficients of an iteration.
        eps: the smallest norm by which a matrix is divided.
        ns_steps: how many iterations.
        adjust_lr_fn: the factor for a matrix's shape: ``'original'`` (or ``None``) or ``'match_rms_adamw'``.
        moment_requires_grad: leaves at the start.
        maximize: maximize the objective.

    Raises:
        TypeError: from ``init``: a parameter is complex.
        ValueError: from ``init``: a parameter has not two dimensions.

    Example:
        >>> import torch
        >>> w = torch.tensor([[3.0, 0.0], [0.0, 1.0]])
        >>> impl = muon(lr=0.1, weight_decay=0.0, ns_coefficients=(2.0, -1.5, 0.5), ns_steps=10)
        >>> impl.update(w, impl.init(w), params=w)[0].round(decimals=3)
        tensor([[-0.1000, -0.0000],
                [-0.0000, -0.1000]])
    """
    check_decay("momentum", momentum)
    return chain(
        *penalized(0.0, maximize),
        elementwise(
            TraceState,
            partial(_average, momentum=momentum, nesterov=bool(nesterov)),
            first=partial(first_trace, False, moment_requires_grad),
        ),
        orthogonalize(ns_coefficients, ns_steps, eps, adjust_lr_fn),
        add_decayed_weights(weight_decay),
        scale_by_learning_rate(lr),
    )


def _average(
    grads: list[Tensor], averages: list[Tensor], *, momentum: HyperParameter, nesterov: bool, inplace: bool
) -> tuple[list[Tensor], ...]:
    averages = foreach.interpolate(averages, grads, 1 - momentum, inplace=inplace)
    return foreach.interpolate(grads, averages, momentum) if nesterov else [*averages], averages
