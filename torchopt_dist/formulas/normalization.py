"""A tensor, dimensions → the tensor normalized over them, with right derivatives of every order; and its parts."""

from __future__ import annotations

import torch
from torch import Tensor

from torchopt_dist.core.types import OptionalTensor

__all__ = ["by_channel", "normalized", "projected", "scaled", "standardized"]


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
