"""``layer_norm`` → by the formula inside of transforms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from torchopt_dist.formulas.normalization import normalized, scaled, standardized
from torchopt_dist.formulas.operands import need_formula

__all__ = ["layer_norm", "native_layer_norm"]


def layer_norm(
    torchs: Callable[..., Tensor],
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    """By the formula where that is needed."""
    shape = tuple(normalized_shape)
    if not need_formula(input) or tuple(input.shape[input.ndim - len(shape) :]) != shape:
        return torchs(input, normalized_shape, weight, bias, eps, cudnn_enable)
    return normalized(input, tuple(range(-len(shape), 0)), weight, bias, eps=eps)


def native_layer_norm(
    torchs: Callable[..., tuple[Tensor, Tensor, Tensor]],
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`layer_norm`, with the mean and the scale, which are constants in torch, too."""
    shape = tuple(normalized_shape)
    if not need_formula(input) or tuple(input.shape[input.ndim - len(shape) :]) != shape:
        return torchs(input, normalized_shape, weight, bias, eps)
    dims = tuple(range(-len(shape), 0))
    x, scale = standardized(input, dims, eps)
    return scaled(x, weight, bias), input.detach().mean(dims, keepdim=True), scale.detach()
