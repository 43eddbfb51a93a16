"""A loss, tensors → the gradients of the loss with respect to the tensors, ``None`` where there is none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from torchopt_dist import torch_private
from torchopt_dist.core.types import OptionalTensor
from torchopt_dist.core.vmap import values_of
from torchopt_dist.ops._columns import PLAIN
from torchopt_dist.transform._recorded_gradients import recorded_gradients

__all__ = ["gradients", "gradients_missing"]


def gradients(
    loss: Tensor, leaves: Sequence[Any], *, create_graph: bool, retain_graph: bool | None = None
) -> list[OptionalTensor]:
    """Differentiate a loss; inside ``vmap``, each sample's loss with respect to the sample's own tensors.

    Args:
        loss: a tensor of one element.
        leaves: tensors; those that are ``None`` or do not require grad (frozen) get ``None``.
        create_graph: record the gradients, so that they can be differentiated.
        retain_graph: keep the loss's graph; as ``create_graph``, if not given.

    Returns:
        A gradient a leaf; ``None`` for a frozen leaf or one that the loss does not depend on.

    Raises:
        TypeError: ``loss`` or a leaf is not a tensor.
        ValueError: ``loss`` has more than one element, or depends on none of the leaves; inside ``vmap``, it
            differs between samples and depends on a leaf that does not.
    """
    if not isinstance(loss, Tensor):
        raise TypeError(f"`loss` must be a tensor, got {type(loss).__name__}")
    if loss.numel() != 1:
        raise ValueError(f"`loss` must have one element, got shape {tuple(loss.shape)}")
    if not PLAIN.issuperset(map(type, leaves)):
        for leaf in leaves:
            if leaf is not None and not isinstance(leaf, Tensor):
                raise TypeError(f"parameters must be tensors, got {type(leaf).__name__}")
    if not torch_private.transforms_are_active():
        return _outside_of_transforms(loss, leaves, create_graph, retain_graph)
    levels = torch_private.vmaps()
    held = [None if leaf is None else values_of(leaf, levels) for leaf in leaves]
    wanted = {place: one for place, one in enumerate(held) if one is not None and one.values.requires_grad}
    of_loss = values_of(loss, levels)
    found: Sequence[OptionalTensor] = ()
    if of_loss.values.requires_grad and wanted:
        found = _differentiated(
            of_loss.values.sum() if of_loss.dims else loss,
            [one.values for one in wanted.values()],
            create_graph,
            retain_graph,
        )
    if all(grad is None for grad in found):
        raise gradients_missing(len(leaves), len(wanted))
    out: list[OptionalTensor] = [None] * len(leaves)
    for (place, one), grad in zip(wanted.items(), found, strict=True):
        if grad is None:
            continue
        if not one.differ_where(of_loss):
            raise ValueError(
                "`loss` must depend on parameters that each sample of `vmap` has for itself, and one of these is the "
                "same for all: make the MetaOptimizer inside the function that `vmap` maps, and the loss after it, or "
                "map over the parameters, too"
            )
        out[place] = one.tensor(grad)
    return out


def _outside_of_transforms(
    loss: Tensor, leaves: Sequence[OptionalTensor], create_graph: bool, retain_graph: bool | None
) -> list[OptionalTensor]:
    own = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    found: Sequence[OptionalTensor] = ()
    if loss.requires_grad and own:
        found = _differentiated(loss, own, create_graph, retain_graph)
    if all(grad is None for grad in found):
        raise gradients_missing(len(leaves), len(own))
    if len(own) == len(leaves):
        return list(found)
    rest = iter(found)
    return [next(rest) if leaf is not None and leaf.requires_grad else None for leaf in leaves]


def _differentiated(
    loss: Tensor, leaves: Sequence[Tensor], create_graph: bool, retain_graph: bool | None
) -> tuple[OptionalTensor, ...]:
    if create_graph:
        return recorded_gradients(loss, leaves, retain_graph=retain_graph)
    return torch_private.grad_of_loss(loss, leaves, retain_graph=retain_graph)


def gradients_missing(count: int, wanted: int) -> ValueError:
    """The error for a loss that depends on none of ``count`` parameters, of which ``wanted`` require grad."""
    text = (
        "`loss` must depend on the parameters as they are now (was it computed before the last step? by another "
        "module? under torch.no_grad? a MetaOptimizer's step takes a function, `optimizer.step(lambda: loss)`, and "
        f"calls it with gradients enabled); of {count} parameters, {wanted} require grad, and it depends on none of "
        "these"
    )
    if torch_private.transforms_are_active():
        text += (
            "; inside `vmap`, make the MetaOptimizer inside the function that is mapped, and the loss after it; "
            "inside `torch.func.grad`, give gradients to the `update` of a transformation"
        )
    return ValueError(text)
