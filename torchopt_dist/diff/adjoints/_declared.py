"""What an inner loop was given → the tensors in it for which there may be a gradient."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchopt_dist import pytree
from torchopt_dist.core.graphs import edge_of, edges_behind
from torchopt_dist.core.vjp import leaf_like
from torchopt_dist.transform.base import ChainedGradientTransformation

__all__ = [
    "consists_of_numbers",
    "depend_on_each_other",
    "leaves_at",
    "refuse",
    "tensors_of_batches",
    "tensors_of_meta",
    "tensors_within",
]


def tensors_of_meta(meta: Any) -> list[Tensor]:
    """The tensors of a tree whose leaves are tensors, modules, numbers or ``None``.

    Raises:
        TypeError: a leaf is something else.
    """
    found: list[Any] = []
    if meta is None:
        return found
    for leaf in [meta] if isinstance(meta, Tensor) else pytree.flatten(meta)[0]:
        if isinstance(leaf, nn.Module):
            found += [*leaf.parameters(), *leaf.buffers()]
        elif isinstance(leaf, Tensor):
            found.append(leaf)
        elif leaf is not None and not isinstance(leaf, numbers.Number):
            raise TypeError(
                f"`meta` must be a tree of tensors and modules, got a {type(leaf).__name__} in it"
            )
    return found


def tensors_of_batches(batches: Any) -> list[Tensor]:
    """The tensors of batches that are there before the loop runs."""
    if isinstance(batches, Tensor):
        return [batches]
    if not isinstance(batches, (list, tuple)):
        return []
    return [leaf for batch in batches for leaf in pytree.flatten(batch)[0] if isinstance(leaf, Tensor)]


def tensors_within(thing: Any) -> list[Tensor]:
    """The tensors with which functions of an optimizer were made: its hyper-parameters."""
    if consists_of_numbers(thing):
        return []
    found: list[Tensor] = []
    visited: set[int] = set()
    waiting = [thing]
    while waiting:
        one = waiting.pop()
        if type(one) in _PLAIN:
            continue
        if isinstance(one, Tensor):
            found.append(one)
        elif id(one) not in visited and not isinstance(one, _WHOLE):
            visited.add(id(one))
            waiting.extend(reversed(_parts(one)))
    return found


def consists_of_numbers(optimizer: Any) -> bool:
    """Whether it is known that all hyper-parameters of an optimizer are numbers, without looking at each."""
    if not isinstance(optimizer, ChainedGradientTransformation):
        return False
    whole = optimizer.fused_step
    return whole.of_gradients_alone and whole.first_link == 0


_PLAIN = frozenset((float, int, bool, str, type(None), torch.dtype))
_WHOLE = (str, bytes, type, nn.Module)


def _parts(thing: Any) -> list[Any]:
    if isinstance(thing, functools.partial):
        return [thing.func, *thing.args, *thing.keywords.values()]
    if isinstance(thing, dict):
        return list(thing.values())
    if isinstance(thing, (tuple, list)):
        return [*thing, *getattr(thing, "__dict__", {}).values()]
    if callable(thing):
        cells = getattr(thing, "__closure__", None) or ()
        parts = [cell.cell_contents for cell in cells if _is_filled(cell)]
        parts += getattr(thing, "__defaults__", None) or ()
        return [*parts, getattr(thing, "__self__", None), *getattr(thing, "__dict__", {}).values()]
    if hasattr(thing, "__dict__") and type(thing).__module__.startswith("torchopt_dist."):
        return list(vars(thing).values())
    return []


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def depend_on_each_other(tensors: Sequence[Tensor]) -> bool:
    """Whether a tensor is computed from another one."""
    edges = [edge_of(tensor) for tensor in tensors]
    own = {node for node, _ in edges}
    return any(
        following in own for (node, _), _ in edges_behind(edges) for following, _ in node.next_functions
    )


def leaves_at(tensors: Sequence[Tensor], places: Sequence[int]) -> list[Tensor]:
    """The tensors, with leaves in the places of those at ``places``."""
    made = list(tensors)
    for place in places:
        made[place] = leaf_like(made[place])
    return made


def refuse(undeclared: Sequence[Tensor]) -> None:
    """Raise if there are tensors whose gradient would be lost.

    Raises:
        ValueError: there are some.
    """
    if undeclared:
        shapes = ", ".join(str(tuple(leaf.shape)) for leaf in undeclared)
        raise ValueError(
            "`meta` must list every tensor that requires grad and that the loss or the optimizer uses from outside; "
            f"it lacks {len(undeclared)}, of shape {shapes}: list them, or detach what is to have no gradient (what it "
            "lists is not followed into TorchScript)"
        )
