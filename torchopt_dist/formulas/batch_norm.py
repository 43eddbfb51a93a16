"""``torch.batch_norm``, ``native_batch_norm`` and ``instance_norm`` → the same by the formula, inside of transforms."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from torchopt_dist.core.types import OptionalTensor
from torchopt_dist.formulas.normalization import by_channel, normalized, scaled, standardized
from torchopt_dist.formulas.operands import need_formula

__all__ = ["batch_norm", "instance_norm", "native_batch_norm"]


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
    """By the formula where that is needed; running statistics are torch's."""
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
    if not training or input.ndim < 2 or not need_formula(input):
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
    """By the formula over these dimensions; torch's, if there are none or the formula is not needed."""
    if not dims or not need_formula(input):
        return torchs(input, weight, bias, *running, *settings)
    if running[0] is not None:
        torchs(input.detach(), None, None, *running, *settings)
    _, _, eps, _ = settings
    weight, bias = by_channel(weight, input.ndim), by_channel(bias, input.ndim)
    return normalized(input, dims, weight, bias, eps=eps)
