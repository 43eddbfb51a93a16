"""Moved to :mod:`torchopt_dist.ops.lists`."""

from torchopt_dist.ops.lists import add, multiply, pick, present, put

__all__ = ["add", "multiply", "pick", "present", "put"]
