"""Parameters, a vector → the product of a matrix with the vector, without the matrix; leaves of a tree ↔ one vector.

An operator is a pure function of its parameters and the vector; both are lists of tensors, the leaves of trees. It
holds no tensors, so that autograd and ``torch.func`` see all of them as arguments.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from torchopt_dist.core.vjp import Tensors, vjp

__all__ = [
    "BatchedOperator",
    "LinearOperator",
    "NormalOperator",
    "Product",
    "RidgeOperator",
    "TransposedJacobian",
    "TransposedOperator",
    "VectorLayout",
]


Product: TypeAlias = Callable[[Tensors], Tensors]
"""Vector → product, the parameters fixed."""


class LinearOperator(ABC):
    """A square matrix as a function."""

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """The leading dimensions of every vector: the shape of the batch of products that are computed at once."""
        return ()

    @abstractmethod
    def apply(self, params: Tensors, vector: Tensors) -> Tensors:
        """The product, differentiable with regard to both."""

    def prepared(self, params: Tensors, like: Tensors) -> Product:
        """Make a function for many products, which need not be differentiable.

        Args:
            params: the parameters.
            like: a vector, for its shapes.
        """
        return partial(self.apply, params)

    def transposed(self) -> LinearOperator:
        """The operator of the transposed matrix, conjugated if it is complex."""
        return TransposedOperator(self)


@dataclass(frozen=True)
class _Wrapper(LinearOperator):
    inner: LinearOperator

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return self.inner.batch_shape


@dataclass(frozen=True)
class TransposedOperator(_Wrapper):
    """The transpose of any operator: the backward pass of its product."""

    def apply(self, params: Tensors, vector: Tensors) -> Tensors:
        """Multiply, differentiably."""
        return self.prepared(params, vector)(vector)

    def prepared(self, params: Tensors, like: Tensors) -> Product:
        """Fix the parameters."""
        return vjp(partial(self.inner.apply, params), [torch.zeros_like(leaf) for leaf in like])[1]

    def transposed(self) -> LinearOperator:
        """The operator of the transposed matrix."""
        return self.inner


@dataclass(frozen=True)
class TransposedJacobian(LinearOperator):
    """The transposed Jacobian of a function with regard to its first argument.

    The parameters are the first ``count`` tensors, the point, and after them the function's other arguments.
    """

    function: Callable[[Tensors, Tensors], Tensors]
    count: int
    batch: tuple[int, ...] = ()
    """The leading dimensions of the function's values, of which each depends on its own part of the point alone."""

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """The leading dimensions of every vector."""
        return self.batch

    def apply(self, params: Tensors, vector: Tensors) -> Tensors:
        """Multiply, differentiably."""
        return self.prepared(params, vector)(vector)

    def prepared(self, params: Tensors, like: Tensors) -> Product:
        """Fix the parameters."""
        point, others = params[: self.count], params[self.count :]
        return vjp(lambda point: self.function(point, others), point)[1]


@dataclass(frozen=True)
class RidgeOperator(_Wrapper):
    """``A + ridge · I``; ``ridge`` is the first parameter."""

    def apply(self, params: Tensors, vector: Tensors) -> Tensors:
        """Multiply, differentiably."""
        ridge, *others = params
        return _plus_ridge(self.inner.apply(others, vector), ridge, vector)

    def prepared(self, params: Tensors, like: Tensors) -> Product:
        """Fix the parameters."""
        ridge, *others = params
        product = self.inner.prepared(others, like)
        return lambda vector: _plus_ridge(product(vector), ridge, vector)

    def transposed(self) -> LinearOperator:
        """The operator of the transposed matrix."""
        return RidgeOperator(self.inner.transposed())


def _plus_ridge(product: Tensors, ridge: Tensor, vector: Tensors) -> Tensors:
    return [a + ridge.to(v) * v for a, v in zip(product, vector, strict=True)]


@dataclass(frozen=True)
class NormalOperator(_Wrapper):
    """``Aᴴ A``, which is symmetric and, unless A is singular, positive definite."""

    def apply(self, params: Tensors, vector: Tensors) -> Tensors:
        """Multiply, differentiably."""
        return self.inner.transposed().apply(params, self.inner.apply(params, vector))

    def prepared(self, params: Tensors, like: Tensors) -> Product:
        """Fix the parameters."""
        forward = self.inner.prepared(params, like)
        backward = self.inner.transposed().prepared(params, like)
        return lambda vector: backward(forward(vector))

    def transposed(self) -> LinearOperator:
        """The operator of the transposed matrix."""
        return self


@dataclass(frozen=True)
class BatchedOperator(LinearOperator):
    """As many matrices as a ``vmap`` has samples; vectors have one more dimension in front."""

    inner: LinearOperator
    in_dims: tuple[int | None, ...]
    """0 for each parameter that has the new dimension, ``None`` for the others."""
    size: int

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """The leading dimensions of every vector."""
        return (self.size, *self.inner.batch_shape)

    def apply(self, params: Tensors, vector: Tensors) -> Tensors:
        """Multiply, differentiably."""
        batched = torch.vmap(self.inner.apply, in_dims=(list(self.in_dims), 0), randomness="same")
        return batched(params, vector)

    def transposed(self) -> LinearOperator:
        """The operator of the transposed matrix."""
        return BatchedOperator(self.inner.transposed(), self.in_dims, self.size)


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
