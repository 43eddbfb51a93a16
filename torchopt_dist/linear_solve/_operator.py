"""Parameters, a vector → the product of a matrix with the vector, without the matrix.

An operator is a pure function of its parameters and the vector; both are lists of tensors, the leaves of trees. It
holds no tensors, so that autograd and ``torch.func`` see all of them as arguments.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
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
