"""Normalization inside ``vmap`` → the same by its formula, whose derivatives are right in every order.

Inside ``vmap``, torch (2.13) differentiates ``layer_norm``, and ``batch_norm`` and ``instance_norm`` by their batch's
statistics, in a way that takes mean and variance for constants where the gradient of the weight is differentiated again
from outside. So a step of ``torch.func.grad`` on the weight has a wrong gradient with respect to all that comes before
it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from torchopt_dist._functional import replaced
from torchopt_dist._torch_private import transforms_are_active
from torchopt_dist.typing import OptionalTensor

__all__ = ["normalization_by_formula"]


def normalization_by_formula() -> AbstractContextManager[None]:
    """A context in which this thread's torch normalizes by its formula inside of transforms.

    ``torch.nn.functional`` and modules call the same functions of ``torch``, which are replaced.
    """
    return replaced(
        torch, {"layer_norm": _layer_norm, "batch_norm": _batch_norm, "instance_norm": _instance_norm}
    )


def _layer_norm(
    torchs: Callable[..., Tensor],
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    shape = tuple(normalized_shape)
    if not _by_formula(input) or tuple(input.shape[input.ndim - len(shape) :]) != shape:
        return torchs(input, normalized_shape, weight, bias, eps, cudnn_enable)
    return _normalized(input, tuple(range(-len(shape), 0)), weight, bias, eps=eps)


def _batch_norm(
    torchs: Callable[..., Tensor],
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    if not training or not _by_formula(input) or input.ndim < 2:
        return torchs(input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled)
    if running_mean is not None:
        torchs(input.detach(), None, None, running_mean, running_var, training, momentum, eps, cudnn_enabled)
    return _of_channels(input, (0, *range(2, input.ndim)), weight, bias, eps=eps)


def _instance_norm(
    torchs: Callable[..., Tensor],
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    if not use_input_stats or not _by_formula(input) or input.ndim < 3:
        return torchs(
            input, weight, bias, running_mean, running_var, use_input_stats, momentum, eps, cudnn_enabled
        )
    if running_mean is not None:
        torchs(
            input.detach(),
            None,
            None,
            running_mean,
            running_var,
            use_input_stats,
            momentum,
            eps,
            cudnn_enabled,
        )
    return _of_channels(input, tuple(range(2, input.ndim)), weight, bias, eps=eps)


def _by_formula(input: Tensor) -> bool:
    """Whether the formula is needed, and has torch's precision."""
    return transforms_are_active() and input.dtype in (torch.float32, torch.float64)


def _of_channels(
    input: Tensor, dims: tuple[int, ...], weight: OptionalTensor, bias: OptionalTensor, *, eps: float
) -> Tensor:
    """As :func:`_normalized`, with a weight and a bias for each channel, the second dimension of the input."""
    shape = (-1, *[1] * (input.ndim - 2))
    weight, bias = (None if x is None else x.reshape(shape) for x in (weight, bias))
    return _normalized(input, dims, weight, bias, eps=eps)


def _normalized(
    input: Tensor, dims: tuple[int, ...], weight: OptionalTensor, bias: OptionalTensor, *, eps: float
) -> Tensor:
    variance, mean = torch.var_mean(input, dims, correction=0, keepdim=True)
    made = (input - mean) * torch.rsqrt(variance + eps)
    if weight is not None:
        made = made * weight
    return made if bias is None else made + bias
