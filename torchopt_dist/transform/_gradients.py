"""A loss, tensors → the gradients of the loss with respect to the tensors, ``None`` where there is none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchopt_dist.typing import OptionalTensor

__all__ = ["gradients"]


def gradients(loss: Tensor, leaves: Sequence[Any], *, create_graph: bool) -> list[OptionalTensor]:
    """Differentiate a loss.

    Args:
        loss: a tensor of one element.
        leaves: tensors; those that are ``None`` or do not require grad (frozen) get ``None``.
        create_graph: record the gradients, so that they can be differentiated; the loss's graph is then kept.

    Returns:
        A gradient a leaf; ``None`` for a frozen leaf or one that the loss does not depend on.

    Raises:
        TypeError: ``loss`` or a leaf is no tensor.
        ValueError: ``loss`` has more than one element, or depends on none of the leaves.
    """
    if not isinstance(loss, Tensor):
        raise TypeError(f"`loss` must be a tensor, got {type(loss).__name__}")
    if loss.numel() != 1:
        raise ValueError(f"`loss` must have one element, got shape {tuple(loss.shape)}")
    for leaf in leaves:
        if leaf is not None and not isinstance(leaf, Tensor):
            raise TypeError(f"parameters must be tensors, got {type(leaf).__name__}")
    places = [place for place, leaf in enumerate(leaves) if leaf is not None and leaf.requires_grad]
    found: Sequence[OptionalTensor] = ()
    if loss.requires_grad and places:
        wanted = [leaves[place] for place in places]
        found = torch.autograd.grad(loss, wanted, create_graph=create_graph, allow_unused=True)
    if all(grad is None for grad in found):
        raise ValueError(
            "`loss` must depend on the parameters as they are now (was it computed before the last step, or "
            f"under torch.no_grad?); of {len(leaves)} parameters, {len(places)} require grad, and it depends "
            "on none of these"
        )
    out: list[OptionalTensor] = [None] * len(leaves)
    for place, grad in zip(places, found, strict=True):
        out[place] = grad
    return out
