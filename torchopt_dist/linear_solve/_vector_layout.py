"""The leaves of a tree ↔ one vector."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torchopt_dist.core.vjp import Tensors

__all__ = ["VectorLayout"]


class VectorLayout:
    """Leaves of shapes (batch…, shape…) ↔ one vector of shape (batch…, n), in the widest of their dtypes."""

    def __init__(self, leaves: Tensors, batch_dims: int) -> None:
        self.batch_shape = leaves[0].shape[:batch_dims]
        self.shapes = [leaf.shape for leaf in leaves]
        self.sizes = [math.prod(leaf.shape[batch_dims:]) for leaf in leaves]
        self.elements = sum(self.sizes)
        self.dtypes = [leaf.dtype for leaf in leaves]
        self.devices = [leaf.device for leaf in leaves]
        self.device = leaves[0].device
        dtype = leaves[0].dtype
        for other in self.dtypes:
            dtype = torch.promote_types(dtype, other)
        self.dtype = dtype
        self.uniform = set(self.dtypes) == {dtype} and set(self.devices) == {self.device}

    def vector(self, leaves: Sequence[Tensor]) -> Tensor:
        """Leaves → the vector."""
        flat = [leaf.reshape(*self.batch_shape, size) for leaf, size in zip(leaves, self.sizes, strict=True)]
        if not self.uniform:
            flat = [leaf.to(self.device, self.dtype) for leaf in flat]
        return flat[0] if len(flat) == 1 else torch.cat(flat, dim=-1)

    def leaves(self, vector: Tensor, like: Tensors | None = None) -> Tensors:
        """A vector → leaves; with ``like``, the leaves of a result, which have memory of their own."""
        parts = zip(vector.split(self.sizes, dim=-1), self.shapes, strict=True)
        leaves = [part.reshape(shape) for part, shape in parts]
        if not self.uniform:
            leaves = [x.to(d, t) for x, d, t in zip(leaves, self.devices, self.dtypes, strict=True)]
        # A result has memory of its own: not views of one vector, and not an argument itself.
        return leaves if like is None else [leaf.clone() for leaf in leaves]
