"""Hyper-parameters of Adam or AdamW → its whole step by the kernels, forward and back."""

from __future__ import annotations

from typing import Any

from torchopt_dist.ops._adam import adam, adam_
from torchopt_dist.transform._fused_step import FusedStep, fused_step
from torchopt_dist.transform.scale_by_adam import ScaleByAdamState

__all__ = ["fused_adam"]


def fused_adam(**options: Any) -> FusedStep | None:
    """As :func:`~torchopt_dist.transform._fused_step.fused_step`, given its ops.

    Args:
        options: of :func:`~torchopt_dist.ops._adam.adam`, and ``fused``.
    """
    return fused_step(
        adam_,
        adam,
        ScaleByAdamState,
        **options,
    )
