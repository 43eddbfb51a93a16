"""The states of a group's parameters and of the group ⇄ the transformation's state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchopt_dist import pytree
from torchopt_dist.core.types import OptState
from torchopt_dist.optim._checkpoint import flatten_with_keys
from torchopt_dist.optim._layout import COUNT, Layout, is_list
from torchopt_dist.transform.base import GradientTransformation

__all__ = ["SHARED", "gather", "scatter"]

SHARED = "shared_state"
"""Where a group has what belongs to none of its parameters."""


def gather(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], impl: GradientTransformation, layout: Layout
) -> OptState:
    """Assemble a group's state; missing parts are as at the first step.

    Raises:
        ValueError: a parameter has only a part of its state.
    """
    states = [optimizer.state[p] for p in group["params"]] if layout.holders else []
    shared = group.get(SHARED, {})
    try:
        return _together(layout, layout.columns(states), shared)
    except KeyError:
        first = _fill(optimizer, group, impl, layout)
        group[SHARED] = shared = {**first, **shared}  # a fused step overwrites them
        return _together(layout, layout.columns(states), shared)


def scatter(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    layout: Layout,
    state: OptState,
    *,
    overwrite: bool,
) -> None:
    """Distribute a state to the parameters and the group.

    Args:
        optimizer: the optimizer with the parameters' states.
        group: one of its groups.
        layout: the layout of the group's state.
        state: the transformation's state.
        overwrite: whether the parameters' tensors are written to, as other processes see them, or replaced.
    """
    _, leaves, _ = flatten_with_keys(state, is_list)
    for key, leaf in zip(layout.keys, leaves, strict=True):
        for p, value in zip(group["params"], leaf, strict=True) if key is not None else ():
            if value is None:
                continue
            if overwrite and value is not optimizer.state[p][key]:
                optimizer.state[p][key].copy_(value)
            else:
                optimizer.state[p][key] = value
    if shared := layout.shared(state):
        group[SHARED] = shared


def _fill(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], impl: GradientTransformation, layout: Layout
) -> dict[str, Any]:
    """Add missing parts of parameters' states; return the group's own initial state."""
    params = group["params"]
    state = impl.init(params)
    first = flatten_with_keys(state, is_list)[1]
    for place, p in enumerate(params) if COUNT in layout.holders else ():
        held = optimizer.state[p]
        own = {key for key, holders in layout.holders.items() if holders[place]}
        found = sorted(key for key, value in held.items() if key in own or isinstance(value, Tensor))
        lacking = sorted(own - set(held) - {COUNT})
        if found and lacking:
            raise ValueError(
                f"`state` of a parameter must have all that this {type(optimizer).__name__} keeps, or nothing: it "
                f"lacks {lacking}, got {found}"
            )
        if found:  # torch's SGD does not count
            held.setdefault(COUNT, torch.ones((), dtype=torch.float32, device="cpu"))
    for key, leaves in zip(layout.keys, first, strict=True):
        for p, leaf in zip(params, leaves, strict=True) if key is not None else ():
            if leaf is not None:
                optimizer.state[p].setdefault(key, leaf)
    return layout.shared(state)


def _together(layout: Layout, columns: dict[str, list[Any]], shared: dict[str, Any]) -> OptState:
    pairs = zip(layout.keys, layout.paths, strict=True)
    return pytree.unflatten(
        layout.spec, [shared[path] if key is None else columns[key] for key, path in pairs]
    )
