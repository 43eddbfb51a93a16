"""``torch.layer_norm``, ``batch_norm``, ``instance_norm`` and the native ones → the same by the formula, in transforms.

The formula, a tensor normalized over dimensions, has right derivatives of every order; so have its parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchopt_dist.core.types import OptionalTensor

__all__ = [
    "batch_norm",
    "by_channel",
    "instance_norm",
    "layer_norm",
    "native_batch_norm",
    "native_layer_norm",
    "normalized",
    "projected",
    "scaled",
    "standardized",
]


def normalized(
    input: Tensor, dims: tuple[int, ...], weight: OptionalTensor, bias: OptionalTensor, *, eps: float
) -> Tensor:
    """With a weight and a bias that can be broadcast to the input."""
    return scaled(standardized(input, dims, eps)[0], weight, bias)


def standardized(input: Tensor, dims: tuple[int, ...], eps: float | Tensor) -> tuple[Tensor, Tensor]:
    """Less its mean, and divided by its deviation; and one by the deviation, which scales it."""
    variance, mean = torch.var_mean(input, dims, correction=0, keepdim=True)
    scale = torch.rsqrt(variance + eps)
    return (input - mean) * scale, scale


def scaled(x: Tensor, weight: OptionalTensor, bias: OptionalTensor) -> Tensor:
    """Times the weight, plus the bias, where there are any."""
    made = x if weight is None else x * weight
    return made if bias is None else made + bias


def by_channel(x: OptionalTensor, ndim: int) -> OptionalTensor:
    """A value for each channel, as it is broadcast to an input, whose second dimension the channels are."""
    return None if x is None else x.reshape(-1, *[1] * (ndim - 2))


def projected(x: Tensor, normalized: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Less its mean, and less what it has in the direction of a normalized tensor: times the scale, the derivative."""
    return x - x.mean(dims, keepdim=True) - normalized * (x * normalized).mean(dims, keepdim=True)


def layer_norm(
    torchs: Callable[..., Tensor],
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    """By the formula, where that has torch's precision."""
    shape = tuple(normalized_shape)
    if not _is_exact(input) or tuple(input.shape[input.ndim - len(shape) :]) != shape:
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
    if not _is_exact(input) or tuple(input.shape[input.ndim - len(shape) :]) != shape:
        return torchs(input, normalized_shape, weight, bias, eps)
    dims = tuple(range(-len(shape), 0))
    x, scale = standardized(input, dims, eps)
    return scaled(x, weight, bias), input.detach().mean(dims, keepdim=True), scale.detach()


def batch_norm(
    torchs: Callable[..., Tensor],
    input: Tensor,
    weight: OptionalTensor,
    bias: OptionalTensor,
    running_mean: OptionalTensor,
    running_var: OptionalTensor,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    """By the formula, where that has torch's precision; running statistics are torch's."""
    dims = (0, *range(2, input.ndim)) if training and input.ndim >= 2 else ()
    running, settings = (running_mean, running_var), (training, momentum, eps, cudnn_enabled)
    return _over(dims, torchs, input, weight, bias, running, settings)


def instance_norm(
    torchs: Callable[..., Tensor],
    input: Tensor,
    weight: OptionalTensor,
    bias: OptionalTensor,
    running_mean: OptionalTensor,
    running_var: OptionalTensor,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    """As :func:`batch_norm`, of each sample by itself."""
    dims = tuple(range(2, input.ndim)) if use_input_stats else ()
    running, settings = (running_mean, running_var), (use_input_stats, momentum, eps, cudnn_enabled)
    return _over(dims, torchs, input, weight, bias, running, settings)


def native_batch_norm(
    torchs: Callable[..., tuple[Tensor, Tensor, Tensor]],
    input: Tensor,
    weight: OptionalTensor,
    bias: OptionalTensor,
    running_mean: OptionalTensor,
    running_var: OptionalTensor,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`batch_norm`, with the mean and the scale, which are constants in torch, too."""
    if not training or input.ndim < 2 or not _is_exact(input):
        return torchs(input, weight, bias, running_mean, running_var, training, momentum, eps)
    if running_mean is not None:
        torchs(input.detach(), None, None, running_mean, running_var, training, momentum, eps)
    dims = (0, *range(2, input.ndim))
    x, scale = standardized(input, dims, eps)
    made = scaled(x, by_channel(weight, input.ndim), by_channel(bias, input.ndim))
    return made, input.detach().mean(dims), scale.detach().flatten()


def _over(
    dims: tuple[int, ...],
    torchs: Callable[..., Tensor],
    input: Tensor,
    weight: OptionalTensor,
    bias: OptionalTensor,
    running: tuple[OptionalTensor, OptionalTensor],
    settings: tuple[bool, float, float, bool],
) -> Tensor:
    """By the formula over these dimensions; torch's, if there are none or that is coarser."""
    if not dims or not _is_exact(input):
        return torchs(input, weight, bias, *running, *settings)
    if running[0] is not None:
        torchs(input.detach(), None, None, *running, *settings)
    _, _, eps, _ = settings
    weight, bias = by_channel(weight, input.ndim), by_channel(bias, input.ndim)
    return normalized(input, dims, weight, bias, eps=eps)


def _is_exact(input: Tensor) -> bool:
    """Whether the formula has torch's precision."""
    return input.dtype in (torch.float32, torch.float64)
