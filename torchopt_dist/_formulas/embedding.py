"""``embedding`` with a row for padding → by a formula inside of transforms, whose rules forget that row."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchopt_dist._torch_private import transforms_are_active

__all__ = ["embedding", "without_gradient_of"]

NO_PADDING = -1
"""What ``torch.embedding`` takes for none; ``F.embedding`` counts from the end itself."""


def embedding(
    torchs: Callable[..., Tensor],
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = NO_PADDING,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """The rows at the indices; that of the padding has no gradient.

    Torch (2.13) maps it to an embedding of all samples' indices, whose padding is another row or none.
    """
    if padding_idx == NO_PADDING or not transforms_are_active():
        return torchs(weight, indices, padding_idx, scale_grad_by_freq, sparse)
    return torchs(without_gradient_of(weight, padding_idx), indices, NO_PADDING, scale_grad_by_freq, sparse)


def without_gradient_of(weight: Tensor, row: int) -> Tensor:
    """The same values, of which those in a row have no gradient."""
    is_row = (torch.arange(weight.shape[0], device=weight.device) == row).unsqueeze(-1)
    return torch.where(is_row, weight.detach(), weight)
