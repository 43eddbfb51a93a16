"""Nodes of operations, gradients of what they return → of what they took, by formulas with derivatives at any point.

Torch (2.13) computes some gradients in a way that is infinite or not a number at special points, at zeros say, and then
masks it. The derivative of what was masked is zero times infinity, which is not a number either; or the mask hides a
part of it, as the one of ``pow`` at an exponent of zero does. Here what is masked is replaced before anything is
computed from it. Where a first derivative is a convention, such as that of a norm at zero, which is zero, the second
one is that of the convention.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from torchopt_dist.core.types import OptionalTensor

__all__ = ["FORMULAS", "Formula"]

Formula: TypeAlias = Callable[
    [Any, Sequence[OptionalTensor], Sequence[bool]], "Sequence[OptionalTensor] | None"
]
"""A node, gradients of its results, which of its own are wanted → these, one an input; ``None``: as torch has it."""

_SERIES = tuple((-1) ** k * 2 * k * math.pi ** (2 * k) / math.factorial(2 * k + 1) for k in range(1, 12))
"""Coefficients of ``x``, ``x ** 3``, … in the derivative of ``sinc``."""
_WRONG = {
    "LinalgDetBackward0": (
        "torch.linalg.det has wrong derivatives at a singular matrix: write the determinant by the entries, such as "
        "`a * d - b * c`, or add a multiple of the identity to the matrix"
    ),
    "PolarBackward0": (
        "torch.polar has wrong derivatives where `abs` is 0: write "
        "`torch.complex(abs * angle.cos(), abs * angle.sin())`"
    ),
}
"""What is refused where a result is zero, and what to write instead."""


def _sinc(
    node: Any, bars: Sequence[OptionalTensor], wanted: Sequence[bool]
) -> Sequence[OptionalTensor] | None:
    (bar,), x = bars, node._saved_self
    if bar is None or x.is_complex():
        return None
    small = x.abs() < 0.25
    near, far = x.masked_fill(~small, 0), x.masked_fill(small, 1)
    series = torch.zeros_like(near)
    for coefficient in reversed(_SERIES):
        series = series * near.square() + coefficient
    slope = (torch.cos(math.pi * far) - torch.sin(math.pi * far) / (math.pi * far)) / far
    return (bar * torch.where(small, series * near, slope),)


def _pow(
    node: Any, bars: Sequence[OptionalTensor], wanted: Sequence[bool]
) -> Sequence[OptionalTensor] | None:
    (bar,), x, exponent, result = bars, node._saved_self, node._saved_exponent, node._saved_result
    if bar is None or result.is_complex():
        return None
    constant = (x == 0) & (exponent == 0)
    flat = (x == 0) & (exponent > (1 if wanted[0] else 0))
    of_x = of_exponent = None
    if wanted[0]:
        of_x = (bar * exponent * x.masked_fill(constant, 1) ** (exponent - 1)).masked_fill(constant, 0)
    if wanted[1]:
        log = torch.log(x.masked_fill(flat, 1))
        of_exponent = (bar * (result * log)).masked_fill((x == 0) & (exponent >= 0), 0)
    return of_x, of_exponent


def _log_add_exp(base: float) -> Formula:
    def formula(
        node: Any, bars: Sequence[OptionalTensor], wanted: Sequence[bool]
    ) -> Sequence[OptionalTensor] | None:
        (bar,), x, y = bars, node._saved_self, node._saved_other
        if bar is None or x.is_complex():
            return None
        difference = (x - y) * math.log(base)
        return bar * torch.sigmoid(difference), bar * torch.sigmoid(-difference)

    return formula


def _log_sum_exp(
    node: Any, bars: Sequence[OptionalTensor], wanted: Sequence[bool]
) -> Sequence[OptionalTensor] | None:
    (bar,), x = bars, node._saved_self
    if bar is None or x.is_complex():
        return None
    dims = _dims(node, x)
    bar, result = (_kept(y, node, dims) for y in (bar, node._saved_result))
    return (bar * (x - result.masked_fill(result == -math.inf, 0)).exp(),)


def _log_cum_sum_exp(
    node: Any, bars: Sequence[OptionalTensor], wanted: Sequence[bool]
) -> Sequence[OptionalTensor] | None:
    """By the square of the dimension's numbers, since torch's way by logarithms is undefined at gradients of zero."""
    (bar,), x = bars, node._saved_self
    if bar is None or x.is_complex() or not x.ndim:  # torch's is right where there is one element
        return None
    dim = _signed(node._saved_dim)
    bar, x, result = (y.movedim(dim, -1) for y in (bar, x, node._saved_result))
    result = result.masked_fill(result == -math.inf, 0)
    before = torch.ones(x.shape[-1], x.shape[-1], dtype=torch.bool, device=x.device).tril(-1)
    weights = (x.unsqueeze(-1) - result.unsqueeze(-2)).masked_fill(before, -math.inf).exp()
    return ((bar.unsqueeze(-2) * weights).sum(-1).movedim(-1, dim),)


def _logit(
    node: Any, bars: Sequence[OptionalTensor], wanted: Sequence[bool]
) -> Sequence[OptionalTensor] | None:
    (bar,), x, eps = bars, node._saved_self, node._saved_eps
    if bar is None or eps is None:
        return None
    clamped = (x < eps) | (x > 1 - eps)
    inside = x.masked_fill(clamped, 0.5)
    return ((bar / (inside * (1 - inside))).masked_fill(clamped, 0),)


def _copysign(
    node: Any, bars: Sequence[OptionalTensor], wanted: Sequence[bool]
) -> Sequence[OptionalTensor] | None:
    (bar,), x, result = bars, node._saved_self, node._saved_result
    if bar is None:
        return None
    return (bar * torch.sign(x.detach()) * torch.sign(result.detach()), None)[: len(wanted)]


def _vector_norm(
    node: Any, bars: Sequence[OptionalTensor], wanted: Sequence[bool]
) -> Sequence[OptionalTensor] | None:
    (bar,), x = bars, node._saved_self
    power = float(getattr(node, "_saved_ord", None) or getattr(node, "_saved_p", None) or 0)
    if bar is None or not 2 <= power < math.inf:
        return None
    dims = _dims(node, x)
    bar, norm = (_kept(y, node, dims) for y in (bar, node._saved_result))
    return (bar * _direction(x, norm, power),)


def _dist(
    node: Any, bars: Sequence[OptionalTensor], wanted: Sequence[bool]
) -> Sequence[OptionalTensor] | None:
    (bar,), power = bars, float(node._saved_p)
    if bar is None or not 2 <= power < math.inf:
        return None
    of_x = bar * _direction(node._saved_self - node._saved_other, node._saved_result, power)
    return of_x, -of_x


def _renorm(
    node: Any, bars: Sequence[OptionalTensor], wanted: Sequence[bool]
) -> Sequence[OptionalTensor] | None:
    (bar,), x, power, most = bars, node._saved_self, float(node._saved_p), float(node._saved_maxnorm)
    if bar is None or not 2 <= power < math.inf:
        return None
    one = _signed(node._saved_dim) % x.ndim
    others = [dim for dim in range(x.ndim) if dim != one]
    norm = torch.linalg.vector_norm(x, power, others, keepdim=True)
    is_long, shift = norm > most, norm + 1e-7  # which torch adds
    along = (bar * x).sum(others, keepdim=True) * _direction(x, norm, power)
    return (torch.where(is_long, most / shift * (bar - along / shift), bar),)


def _std(
    node: Any, bars: Sequence[OptionalTensor], wanted: Sequence[bool]
) -> Sequence[OptionalTensor] | None:
    x, dims, std = node._saved_self, _dims(node, node._saved_self), getattr(node, "_saved_result", None)
    std = node._saved_result0 if std is None else std
    correction = 1 if node._saved_correction is None else node._saved_correction
    count = math.prod(x.shape[dim] for dim in dims)
    bar, of_mean = (*(None if y is None else _kept(y, node, dims) for y in bars), None)[:2]
    if bar is None or count <= correction or x.is_complex():
        return None
    std = _kept(std, node, dims)
    found = bar * _direction(x - x.mean(dims, keepdim=True), std, 2) / (count - correction)
    return (found if of_mean is None else found + of_mean / count,)


def _embedding(
    node: Any, bars: Sequence[OptionalTensor], wanted: Sequence[bool]
) -> Sequence[OptionalTensor] | None:
    """Where nothing is looked up, torch has no second derivative."""
    (bar,) = bars
    if bar is None or bar.numel() or node._saved_sparse:
        return None
    return (bar.new_zeros(node._saved_weight_sym_argsize_0, bar.shape[-1]),)


def _refused(node: Any, bars: Sequence[OptionalTensor], wanted: Sequence[bool]) -> None:
    if (node._saved_result == 0).any():
        raise RuntimeError(_WRONG[node.name()])


FORMULAS: Mapping[str, Formula] = {
    "SincBackward0": _sinc,
    "PowBackward1": _pow,
    "LogaddexpBackward0": _log_add_exp(math.e),
    "Logaddexp2Backward0": _log_add_exp(2),
    "LogsumexpBackward0": _log_sum_exp,
    "LogcumsumexpBackward0": _log_cum_sum_exp,
    "LogitBackward0": _logit,
    "CopysignBackward0": _copysign,
    "CopysignBackward1": _copysign,
    "LinalgVectorNormBackward0": _vector_norm,
    "NormBackward0": _vector_norm,
    "NormBackward1": _vector_norm,
    "DistBackward0": _dist,
    "RenormBackward0": _renorm,
    "StdBackward0": _std,
    "StdMeanBackward0": _std,
    "EmbeddingBackward0": _embedding,
    **dict.fromkeys(_WRONG, _refused),
}
"""By the names of nodes."""


def _direction(x: Tensor, norm: Tensor, power: float) -> Tensor:
    """The derivative of a norm; zero where the norm is."""
    zero = norm == 0
    unit = x / norm.masked_fill(zero, 1)
    return (unit if power == 2 else unit.sgn() * unit.abs() ** (power - 1)).masked_fill(zero, 0)


def _dims(node: Any, x: Tensor) -> list[int]:
    """The dimensions that a node's operation has reduced, none of them given for all."""
    dims = getattr(node, "_saved_dim", None)
    return sorted(_signed(dim) % x.ndim for dim in dims) if dims and x.ndim else list(range(x.ndim))


def _signed(dim: int) -> int:
    """Torch saves a dimension counted from the end as a large number."""
    return dim - 2**64 if dim >= 2**63 else dim


def _kept(x: Tensor, node: Any, dims: Sequence[int]) -> Tensor:
    """With the dimensions that have been reduced."""
    if not getattr(node, "_saved_keepdim", False):
        for dim in dims:
            x = x.unsqueeze(dim)
    return x
