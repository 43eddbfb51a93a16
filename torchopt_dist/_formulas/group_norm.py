"""``F.group_norm`` → by the formula, whose gradient has a forward mode."""

from __future__ import annotations

from torch import Tensor

from torchopt_dist._formulas.normalization import by_channel, scaled, standardized

__all__ = ["group_norm"]


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Each group of channels by itself, then scaled by channel."""
    groups = input.reshape(input.shape[0], num_groups, -1)
    values, _scale = standardized(groups, (-1,), eps)
    return scaled(values.reshape(input.shape), by_channel(weight, input.ndim), by_channel(bias, input.ndim))
