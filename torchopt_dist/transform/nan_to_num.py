"""Gradients → the gradients with NaN and infinite entries replaced by numbers."""

from __future__ import annotations

import numbers
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchopt_dist import pytree
from torchopt_dist.core.types import OptState, Params, Updates
from torchopt_dist.ops._columns import as_complex, as_real
from torchopt_dist.transform.base import EmptyState, GradientTransformation, of_elements, stateless

__all__ = ["check_replacements", "nan_to_num", "replace_nonfinite"]


def nan_to_num(
    nan: float = 0.0, posinf: float | None = None, neginf: float | None = None
) -> GradientTransformation:
    """Replace entries that are not finite, as ``torch.nan_to_num``.

    A replaced entry is a constant, so no gradient flows through it. But a graph that computes NaN in the forward pass
    often computes NaN in the backward pass as well. The real and the imaginary part of a complex entry are replaced
    separately.

    Args:
        nan: the replacement for NaN.
        posinf: the replacement for infinity; the largest number of the gradient's dtype, if not given.
        neginf: the replacement for minus infinity; the least number of the dtype, if not given.

    Raises:
        TypeError: an argument is not a number.

    Example:
        >>> import torch
        >>> init, update = nan_to_num(posinf=9.0)
        >>> gradient = torch.tensor([float("nan"), float("inf"), 1.0])
        >>> update(gradient, init(gradient))[0]
        tensor([0., 9., 1.])
    """
    check_replacements(nan, posinf, neginf)
    return GradientTransformation(stateless, partial(_update, nan, posinf, neginf))


def check_replacements(nan: Any, posinf: Any, neginf: Any) -> None:
    """Check that they are numbers; ``posinf`` and ``neginf`` may be ``None``.

    Raises:
        TypeError: one of them is something else.
    """
    if not isinstance(nan, numbers.Real):
        raise TypeError(f"`nan` must be a number, got {type(nan).__name__}")
    for name, value in (("posinf", posinf), ("neginf", neginf)):
        if value is not None and not isinstance(value, numbers.Real):
            raise TypeError(f"`{name}` must be a number or None, got {type(value).__name__}")


def replace_nonfinite(nan: float, posinf: float | None, neginf: float | None, x: Tensor) -> Tensor:
    """``torch.nan_to_num``, with a derivative for complex tensors too, which torch does not have."""
    parts = as_real([x])
    replaced = [torch.nan_to_num(part, nan, posinf, neginf) for part in parts]
    return as_complex(replaced, [x])[0]


@of_elements()
def _update(
    nan: float,
    posinf: float | None,
    neginf: float | None,
    updates: Updates,
    state: EmptyState,
    *,
    params: Params | None = None,
    inplace: bool = False,
) -> tuple[Updates, OptState]:
    replace = partial(replace_nonfinite, nan, posinf, neginf)
    return pytree.map_tensors(replace, updates), state
