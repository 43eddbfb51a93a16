"""A tensor, dimensions → the tensor normalized over them, with right derivatives of every order."""

from __future__ import annotations

import torch
from torch import Tensor

from torchopt_dist.typing import OptionalTensor

__all__ = ["normalized", "normalized_channels", "projected"]


def normalized_channels(
    input: Tensor, dims: tuple[int, ...], weight: OptionalTensor, bias: OptionalTensor, *, eps: float
) -> Tensor:
    """As :func:`normalized`, with a weight and a bias for each channel, the second dimension of the input."""
    shape = (-1, *[1] * (input.ndim - 2))
    weight, bias = (None if x is None else x.reshape(shape) for x in (weight, bias))
    return normalized(input, dims, weight, bias, eps=eps)


def normalized(
    input: Tensor, dims: tuple[int, ...], weight: OptionalTensor, bias: OptionalTensor, *, eps: float
) -> Tensor:
    variance, mean = torch.var_mean(input, dims, correction=0, keepdim=True)
    made = (input - mean) * torch.rsqrt(variance + eps)
    if weight is not None:
        made = made * weight
    return made if bias is None else made + bias


def projected(x: Tensor, normalized: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Less its mean, and less what it has in the direction of a normalized tensor: times the scale, the derivative."""
    return x - x.mean(dims, keepdim=True) - normalized * (x * normalized).mean(dims, keepdim=True)
