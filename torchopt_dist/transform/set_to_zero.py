"""Updates → zeros: for parameters that a partition is to leave where they are."""

from __future__ import annotations

import torch

from torchopt_dist import pytree
from torchopt_dist.core.types import OptState, Params, Updates
from torchopt_dist.transform.base import EmptyState, GradientTransformation, of_elements, stateless

__all__ = ["set_to_zero"]


def set_to_zero() -> GradientTransformation:
    """Replace all updates by zeros, so that parameters stay where they are; ``None`` stays ``None``.

    It is a label's transformation in :func:`~torchopt_dist.transform.partition`.

    Example:
        >>> import torch
        >>> init, update = set_to_zero()
        >>> update(torch.ones(2), init(torch.ones(2)))[0]
        tensor([0., 0.])
    """
    return GradientTransformation(stateless, _update)


@of_elements()
def _update(
    updates: Updates, state: EmptyState, *, params: Params | None = None, inplace: bool = False
) -> tuple[Updates, OptState]:
    return pytree.map_tensors(torch.zeros_like, updates), state
