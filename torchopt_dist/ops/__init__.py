"""Tensors → tensors by fused kernels: the reference formula in Python, and the choice of what runs."""

from torchopt_dist.ops.add_scaled import add_scaled_
from torchopt_dist.ops.library import is_available, why_not

__all__ = ["add_scaled_", "is_available", "why_not"]
