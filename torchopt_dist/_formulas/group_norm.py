"""``F.group_norm`` → by the formula, whose gradient has a forward mode."""

from __future__ import annotations

from torch import Tensor

from torchopt_dist._formulas.normalization import normalized

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
    values = normalized(groups, (-1,), None, None, eps=eps).reshape(input.shape)
    shape = (1, -1, *[1] * (input.dim() - 2))
    if weight is not None:
        values = values * weight.reshape(shape)
    return values if bias is None else values + bias.reshape(shape)
