"""``F.mse_loss`` and ``F.huber_loss`` → by formulas whose gradient has a forward mode."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["huber_loss", "mse_loss"]


def mse_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    weight: Tensor | None = None,
) -> Tensor:
    """The squared errors, weighted and reduced."""
    return _reduced((input - target) ** 2, _reduction(size_average, reduce, reduction), weight)


def huber_loss(
    input: Tensor, target: Tensor, reduction: str = "mean", delta: float = 1.0, weight: Tensor | None = None
) -> Tensor:
    """Squared below ``delta``, linear above it."""
    error = input - target
    size = error.abs()
    values = torch.where(size <= delta, 0.5 * error**2, delta * (size - 0.5 * delta))
    return _reduced(values, reduction, weight)


def _reduced(values: Tensor, reduction: str, weight: Tensor | None = None) -> Tensor:
    if weight is not None:
        values = values * weight
        if reduction == "mean":
            return values.sum() / weight.expand_as(values).sum()
    return values.mean() if reduction == "mean" else values.sum() if reduction == "sum" else values


def _reduction(size_average: bool | None, reduce: bool | None, reduction: str) -> str:
    if size_average is None and reduce is None:
        return reduction
    if reduce is False:
        return "none"
    return "sum" if size_average is False else "mean"
