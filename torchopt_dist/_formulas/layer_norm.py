"""``layer_norm`` → by the formula inside of transforms; or as one node of a graph, whose derivative is short."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchopt_dist._formulas.normalization import normalized, projected, scaled, standardized
from torchopt_dist._formulas.operands import fit_short_formula, need_formula
from torchopt_dist._types import OptionalTensor
from torchopt_dist._vjp import plus

__all__ = ["layer_norm", "native_layer_norm", "short_layer_norm"]


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


def short_layer_norm(
    torchs: Callable[..., Tensor],
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """As one node for the normalization, where the tensors are plain."""
    if not fit_short_formula(input, weight, bias):
        return torchs(input, normalized_shape, weight, bias, eps)
    normalized, _scale = _Normalized.apply(input, tuple(normalized_shape), eps)
    return scaled(normalized, weight, bias)


class _Normalized(torch.autograd.Function):
    """The input, normalized over its last dimensions, and what it was scaled by."""

    apply: ClassVar[Any]

    @staticmethod
    def forward(input: Tensor, shape: tuple[int, ...], eps: float) -> tuple[Tensor, Tensor]:
        normalized, _mean, scale = torch.native_layer_norm(input, shape, None, None, eps)
        return normalized, scale

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.dims = tuple(range(-len(inputs[1]), 0))
        ctx.save_for_backward(*output)
        ctx.save_for_forward(*output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(
        ctx: Any, of_normalized: OptionalTensor, of_scale: OptionalTensor
    ) -> tuple[OptionalTensor, None, None]:
        normalized, scale = ctx.saved_tensors
        found = None
        if of_normalized is not None:
            found = projected(of_normalized, normalized, ctx.dims) * scale
        if of_scale is not None:
            count = math.prod(normalized.shape[dim] for dim in ctx.dims)
            found = plus(found, normalized * (-of_scale * scale.square() / count))
        return found, None, None

    @staticmethod
    def jvp(ctx: Any, input_dot: OptionalTensor, *_: None) -> tuple[OptionalTensor, OptionalTensor]:
        normalized, scale = ctx.saved_tensors
        if input_dot is None:
            return None, None
        along = (normalized * input_dot).mean(ctx.dims, keepdim=True)
        return projected(input_dot, normalized, ctx.dims) * scale, -along * scale.square()
