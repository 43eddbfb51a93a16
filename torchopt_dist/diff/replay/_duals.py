"""Tensors and their tangents → duals of forward mode, and back to pairs, which outlive the level of forward mode."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd import forward_ad

from torchopt_dist._types import OptionalTensor
from torchopt_dist._vjp import plus

__all__ = [
    "NoForwardModeError",
    "Pair",
    "dual",
    "dual_level",
    "leaf_of_pair",
    "loses_tangents",
    "pair_of",
    "plus_pair",
]

Pair = tuple[Tensor, OptionalTensor]
"""A tensor, and its tangent if it has one."""


class NoForwardModeError(Exception):
    """There is no forward mode here, or an operation has none."""


@functools.cache
def _load() -> None:
    """Load what torch loads when forward mode is first used, at which it warns of a function of its own."""
    with warnings.catch_warnings(action="ignore"), forward_ad.dual_level():
        forward_ad.make_dual(torch.zeros(()), torch.zeros(()))


@contextmanager
def dual_level() -> Iterator[None]:
    """A context in which duals can be made; at its end they are plain tensors again."""
    _load()
    with forward_ad.dual_level():
        yield


def dual(pair: Pair) -> Tensor:
    """Make a dual of a tensor and its tangent; the tensor itself, if it has none.

    Raises:
        NoForwardModeError: torch has forward mode switched off, as in the forward of a custom function.
    """
    primal, tangent = pair
    if tangent is None:
        return primal
    made = forward_ad.make_dual(primal, tangent)
    if forward_ad.unpack_dual(made).tangent is None:
        raise NoForwardModeError("torch has forward mode switched off here")
    return made


def pair_of(tensor: Tensor) -> Pair:
    """A dual's tensor and tangent, without history."""
    primal, tangent = forward_ad.unpack_dual(tensor)
    return primal.detach(), None if tangent is None else tangent.detach()


def leaf_of_pair(pair: Pair) -> Tensor:
    """A dual that requires grad, with no history behind it."""
    primal, tangent = pair
    return dual((primal.detach().requires_grad_(), tangent))


def plus_pair(one: Pair | None, other: Pair) -> Pair:
    """The sum of two duals."""
    return other if one is None else (one[0] + other[0], plus(one[1], other[1]))


_LOSING = (
    "AsStridedScatter",
    "LinalgCholeskyEx",
    "LinalgDet",
    "LinalgEigh",
    "LinalgPinv",
    "LinalgSlogdet",
    "LinalgSolveEx",
    "Logcumsumexp",
    "MaxUnpool",
    "ScatterReduce",
    "TriangularSolve",
    "torch::jit::",
)
"""What the names of nodes begin with that lose tangents; found by a sweep over the operations of torch's own tests, and
a compiled part of TorchScript, which takes no tangents at all."""


def loses_tangents(name: str) -> bool:
    """Whether a node of this name may lose tangents in its backward."""
    return name.startswith(_LOSING)
