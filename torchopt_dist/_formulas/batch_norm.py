"""``torch.batch_norm`` and ``instance_norm`` → the same by the formula, inside of transforms."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from torchopt_dist._formulas.normalization import normalized_channels
from torchopt_dist._formulas.operands import need_formula

__all__ = ["batch_norm", "instance_norm"]


def batch_norm(
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
    """By the formula where that is needed; running statistics are torch's."""
    if not training or not need_formula(input) or input.ndim < 2:
        return torchs(input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled)
    if running_mean is not None:
        torchs(input.detach(), None, None, running_mean, running_var, training, momentum, eps, cudnn_enabled)
    return normalized_channels(input, (0, *range(2, input.ndim)), weight, bias, eps=eps)


def instance_norm(
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
    """As :func:`batch_norm`, of each sample by itself."""
    if not use_input_stats or not need_formula(input) or input.ndim < 3:
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
    return normalized_channels(input, tuple(range(2, input.ndim)), weight, bias, eps=eps)
