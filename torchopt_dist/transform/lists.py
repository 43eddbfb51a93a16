"""Lists of tensors → lists of tensors, in one call where torch has one.

``torch._foreach_*`` runs a list in one call, in forward and in backward, to any order. It has no batching
rule and no derivative for a tensor factor, and ``torch.compile`` fuses a plain loop itself: those run the
loop.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchopt_dist.transform.hyperparameters import HyperParameter
from torchopt_dist.typing import OptionalTensor

__all__ = ["add", "multiply", "pick", "present", "put"]


def present(leaves: Sequence[OptionalTensor]) -> list[int]:
    """The places of a list that hold a tensor, not ``None``."""
    return [place for place, leaf in enumerate(leaves) if leaf is not None]


def pick(leaves: Sequence[OptionalTensor], places: Sequence[int]) -> list[Tensor]:
    """The tensors at these places.

    Raises:
        ValueError: one of them is ``None``.
    """
    picked = [leaves[place] for place in places]
    for leaf in picked:
        if leaf is None:
            raise ValueError("a leaf has a gradient, but its parameter or its state is None")
    return picked  # type: ignore[return-value]


def put(
    leaves: Sequence[OptionalTensor], places: Sequence[int], new: Sequence[Tensor]
) -> list[OptionalTensor]:
    """The list with new tensors at these places; the given list stays as it is."""
    out = list(leaves)
    for place, tensor in zip(places, new, strict=True):
        out[place] = tensor
    return out


def multiply(xs: list[Tensor], factor: HyperParameter, *, inplace: bool = False) -> list[Tensor]:
    """Each tensor times a number, or times a tensor of one element.

    Args:
        xs: tensors of any shapes, dtypes and devices.
        factor: the factor; the results keep the dtypes of ``xs``.
        inplace: overwrite ``xs``.
    """
    if isinstance(factor, Tensor):
        scalar = factor.reshape(())
        if inplace:
            return [x.mul_(scalar) for x in xs]
        return [(x * scalar).to(x.dtype) for x in xs]
    if _loop(xs):
        return [x.mul_(factor) if inplace else x * factor for x in xs]
    if inplace:
        torch._foreach_mul_(xs, factor)
        return xs
    return list(torch._foreach_mul(xs, factor))


def add(
    xs: list[Tensor], ys: list[Tensor], alpha: HyperParameter = 1.0, *, inplace: bool = False
) -> list[Tensor]:
    """``x + alpha * y`` for each pair.

    Args:
        xs: tensors of any shapes, dtypes and devices.
        ys: as many, each of the shape of its partner.
        alpha: a number, or a tensor of one element; the results keep the dtypes of ``xs``.
        inplace: overwrite ``xs``.
    """
    if isinstance(alpha, Tensor):
        ys, alpha = multiply(ys, alpha), 1.0
    if _loop(xs):
        added = [
            x.add_(y, alpha=alpha) if inplace else x.add(y, alpha=alpha) for x, y in zip(xs, ys, strict=True)
        ]
    elif inplace:
        torch._foreach_add_(xs, ys, alpha=alpha)
        return xs
    else:
        added = list(torch._foreach_add(xs, ys, alpha=alpha))
    return [z if z.dtype == x.dtype else z.to(x.dtype) for x, z in zip(xs, added, strict=True)]


def _loop(xs: list[Tensor]) -> bool:
    """Whether to go tensor by tensor: nothing to do, compiling, or inside a ``torch.func`` transform."""
    if not xs or torch.compiler.is_compiling():
        return True
    return torch._C._functorch.maybe_current_level() is not None
