"""What an operation is given → whether a formula takes it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torchopt_dist.core.types import OptionalTensor
from torchopt_dist.torch_private import transforms_are_active

__all__ = ["Attention", "need_formula"]


class Attention(NamedTuple):
    """What ``F.scaled_dot_product_attention`` is given."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: OptionalTensor = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def factor(self) -> float:
        """Of the scores."""
        return 1 / math.sqrt(self.query.shape[-1]) if self.scale is None else self.scale

    def by(self, torchs: Callable[..., Tensor]) -> Tensor:
        """What torch's function returns."""
        *rest, scale, enable_gqa = self
        return torchs(*rest, scale=scale, enable_gqa=enable_gqa)


def need_formula(input: Tensor) -> bool:
    """Whether a transform is active, and the formula has torch's precision."""
    return transforms_are_active() and input.dtype in (torch.float32, torch.float64)
