"""Functions of ``torch.nn.functional`` whose gradient has no forward-mode derivative in torch → formulas that have one.

A few nodes of a graph lose the tangent without an error, as their gradient is computed from something that has none,
unless it is recorded itself. ``loses_tangents`` finds these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["Formulas", "loses_tangents"]


class Formulas(TorchFunctionMode):
    """A context in which such functions compute by formulas."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _FORMULAS.get(func, func)(*args, **(kwargs or {}))


def _reduced(values: Tensor, reduction: str, weight: Tensor | None = None) -> Tensor:
    if weight is not None:
        values = values * weight
        if reduction == "mean":
            return values.sum() / weight.expand_as(values).sum()
    return values.mean() if reduction == "mean" else values.sum() if reduction == "sum" else values


def _mse_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    weight: Tensor | None = None,
) -> Tensor:
    return _reduced((input - target) ** 2, _reduction(size_average, reduce, reduction), weight)


def _reduction(size_average: bool | None, reduce: bool | None, reduction: str) -> str:
    if size_average is None and reduce is None:
        return reduction
    if reduce is False:
        return "none"
    return "sum" if size_average is False else "mean"


def _huber_loss(
    input: Tensor, target: Tensor, reduction: str = "mean", delta: float = 1.0, weight: Tensor | None = None
) -> Tensor:
    size = (input - target).abs()
    values = torch.where(size <= delta, 0.5 * size**2, delta * (size - 0.5 * delta))
    return _reduced(values, reduction, weight)


def _silu(input: Tensor, inplace: bool = False) -> Tensor:
    values = input * torch.sigmoid(input)
    return input.copy_(values) if inplace else values


def _mish(input: Tensor, inplace: bool = False) -> Tensor:
    values = input * torch.tanh(F.softplus(input))
    return input.copy_(values) if inplace else values


def _group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    groups = input.reshape(input.shape[0], num_groups, -1)
    centred = groups - groups.mean(-1, keepdim=True)
    values = (centred * torch.rsqrt((centred**2).mean(-1, keepdim=True) + eps)).reshape(input.shape)
    shape = (1, -1, *[1] * (input.dim() - 2))
    if weight is not None:
        values = values * weight.reshape(shape)
    return values if bias is None else values + bias.reshape(shape)


_FORMULAS: dict[Any, Callable[..., Any]] = {
    F.mse_loss: _mse_loss,
    F.huber_loss: _huber_loss,
    F.silu: _silu,
    F.mish: _mish,
    F.group_norm: _group_norm,
}

_LOSING = (
    "AsStridedScatter",
    "LinalgCholeskyEx",
    "LinalgDet",
    "LinalgEigh",
    "LinalgPinv",
    "LinalgSlogdet",
    "LinalgSolveEx",
    "Logcumsumexp",
    "MaxUnpool",
    "ScatterReduce",
    "TriangularSolve",
    "torch::jit::",
)
"""What the names of nodes begin with that lose tangents; found by a sweep over the operations of torch's own tests, and
a compiled part of TorchScript, which takes no tangents at all."""


def loses_tangents(name: str) -> bool:
    """Whether a node of this name may lose tangents in its backward."""
    return name.startswith(_LOSING)
