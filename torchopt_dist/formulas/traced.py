"""Normalization and embeddings → by their formulas inside of transforms, for code that torch's compiler traces.

The compiler cannot trace the replacement of torch's functions, and follows a mode; it sees the functions of
``torch.nn.functional``, whose arguments have another order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torchopt_dist.core.types import OptionalTensor
from torchopt_dist.formulas.embedding import padded
from torchopt_dist.formulas.normalization import by_channel, normalized
from torchopt_dist.formulas.weight_norm import scaled_to
from torchopt_dist.torch_private import places_of_weight_norm

__all__ = ["TracedFormulas"]

_WEIGHT_NORMS = tuple(getattr(module, name) for module, name in places_of_weight_norm())


class TracedFormulas(TorchFunctionMode):
    """A context in which traced code normalizes and looks up rows by formulas."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call the formula, if there is one."""
        if func is F.layer_norm or func is torch.layer_norm:
            return _layer_norm(*args, **(kwargs or {}))
        if func is F.batch_norm:
            return _batch_norm(*args, **(kwargs or {}))
        if func is F.instance_norm:
            return _instance_norm(*args, **(kwargs or {}))
        if (
            func is F.embedding
            and (kwargs or {}).get("padding_idx", args[2] if len(args) > 2 else None) is not None
        ):
            return _embedding(*args, **(kwargs or {}))
        if func in _WEIGHT_NORMS:
            return scaled_to(*args, **(kwargs or {}))
        if func is torch.batch_norm or func is torch.instance_norm:
            raise NotImplementedError("a compiled task cannot call torch.batch_norm: use torch.nn.functional")
        return func(*args, **(kwargs or {}))


def _layer_norm(
    input: Tensor,
    normalized_shape: Any,
    weight: OptionalTensor = None,
    bias: OptionalTensor = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    return normalized(input, tuple(range(-len(normalized_shape), 0)), weight, bias, eps=eps)


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    made = F.embedding(input, weight, None, max_norm, norm_type, scale_grad_by_freq, sparse)
    assert padding_idx is not None
    return padded(made, input, padding_idx % weight.shape[0])


def _batch_norm(
    input: Tensor,
    running_mean: OptionalTensor,
    running_var: OptionalTensor,
    weight: OptionalTensor = None,
    bias: OptionalTensor = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if not training or running_mean is not None:
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    weight, bias = by_channel(weight, input.ndim), by_channel(bias, input.ndim)
    return normalized(input, (0, *range(2, input.ndim)), weight, bias, eps=eps)


def _instance_norm(
    input: Tensor,
    running_mean: OptionalTensor = None,
    running_var: OptionalTensor = None,
    weight: OptionalTensor = None,
    bias: OptionalTensor = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if not use_input_stats or running_mean is not None:
        return F.instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
    weight, bias = by_channel(weight, input.ndim), by_channel(bias, input.ndim)
    return normalized(input, tuple(range(2, input.ndim)), weight, bias, eps=eps)
