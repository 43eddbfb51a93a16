"""A function → the same function, with a gradient that is not that of its steps."""

from torchopt_dist.diff import implicit, zero_order

__all__ = ["implicit", "zero_order"]
