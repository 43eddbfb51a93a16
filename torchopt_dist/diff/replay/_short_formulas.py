"""Attention and layer normalization → the same as one node of a graph each, whose derivative is short in forward mode.

Torch computes the tangents of both by decompositions in Python, and in a sweep of forward over reverse mode the graph
has nodes, with all that they save, for the computation of tangents, too, which nobody goes back through. A custom
function has one node, saves what its derivative needs, and has no graph of its tangents.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from torchopt_dist._functional import replaced
from torchopt_dist._torch_private import transforms_are_active
from torchopt_dist.diff.replay._duals import plus
from torchopt_dist.typing import OptionalTensor

__all__ = ["short_formulas"]


def short_formulas() -> AbstractContextManager[None]:
    """A context in which this thread computes by them, wherever ``torch.nn.functional`` is asked by these names."""
    return replaced(F, {"scaled_dot_product_attention": _attention, "layer_norm": _layer_norm})


def _fits(*tensors: OptionalTensor) -> bool:
    """Whether a formula takes the tensors here: of one type that is not short, and not in a transform or autocast."""
    there = [x for x in tensors if x is not None]
    return (
        all(type(x) in (Tensor, torch.nn.Parameter) and x.layout == torch.strided for x in there)
        and {x.dtype for x in there} in ({torch.float32}, {torch.float64})
        and not torch.is_autocast_enabled(there[0].device.type)
        and not transforms_are_active()
    )


def _attention(
    torchs: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    mask_fits = attn_mask is None or (not attn_mask.requires_grad and attn_mask.layout == torch.strided)
    alike = query.shape[:-2] == key.shape[:-2] == value.shape[:-2]
    if dropout_p or enable_gqa or is_causal or not mask_fits or not alike or not _fits(query, key, value):
        return torchs(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    attended, _weights = _Attention.apply(query, key, value, attn_mask, factor)
    return attended


class _Attention(torch.autograd.Function):
    """Softmax of the scores, times the values; and the softmax."""

    apply: ClassVar[Any]

    @staticmethod
    def forward(
        query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, factor: float
    ) -> tuple[Tensor, Tensor]:
        scores = (query * factor) @ key.transpose(-2, -1)
        if mask is None:
            weights = scores.softmax(-1)
        else:
            scores = scores + mask if mask.is_floating_point() else scores.masked_fill(~mask, -math.inf)
            # As in torch, what may attend to nothing gets zeros.
            weights = scores.softmax(-1).masked_fill(scores.amax(-1, keepdim=True).isneginf(), 0)
        return weights @ value, weights

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        query, key, value, _mask, ctx.factor = inputs
        ctx.save_for_backward(query, key, value, output[1])
        ctx.save_for_forward(query, key, value, output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(
        ctx: Any, of_attended: OptionalTensor, of_weights: OptionalTensor
    ) -> tuple[OptionalTensor, ...]:
        query, key, value, weights = ctx.saved_tensors
        of_value = None
        if of_attended is not None:
            of_value = weights.transpose(-2, -1) @ of_attended
            of_weights = plus(of_weights, of_attended @ value.transpose(-2, -1))
        if of_weights is None:
            return None, None, of_value, None, None
        of_weights = weights * of_weights
        of_scores = (of_weights - weights * of_weights.sum(-1, keepdim=True)) * ctx.factor
        return of_scores @ key, of_scores.transpose(-2, -1) @ query, of_value, None, None

    @staticmethod
    def jvp(
        ctx: Any, query_dot: OptionalTensor, key_dot: OptionalTensor, value_dot: OptionalTensor, *_: None
    ) -> tuple[OptionalTensor, OptionalTensor]:
        query, key, value, weights = ctx.saved_tensors
        scores_dot = None if query_dot is None else query_dot @ key.transpose(-2, -1)
        if key_dot is not None:
            scores_dot = plus(scores_dot, query @ key_dot.transpose(-2, -1))
        attended_dot = None if value_dot is None else weights @ value_dot
        if scores_dot is None:
            return attended_dot, torch.zeros_like(weights)
        weights_dot = weights * scores_dot * ctx.factor
        weights_dot = weights_dot - weights * weights_dot.sum(-1, keepdim=True)
        return plus(attended_dot, weights_dot @ value), weights_dot


def _layer_norm(
    torchs: Callable[..., Tensor],
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    if not _fits(input, weight, bias):
        return torchs(input, normalized_shape, weight, bias, eps)
    normalized, _scale = _Normalized.apply(input, tuple(normalized_shape), eps)
    scaled = normalized if weight is None else normalized * weight
    return scaled if bias is None else scaled + bias


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
            found = _projected(of_normalized, normalized, ctx.dims) * scale
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
        return _projected(input_dot, normalized, ctx.dims) * scale, -along * scale.square()


def _projected(x: Tensor, normalized: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Less its mean, and less what it has in the direction of the normalized input."""
    return x - x.mean(dims, keepdim=True) - normalized * (x * normalized).mean(dims, keepdim=True)
