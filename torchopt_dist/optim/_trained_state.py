"""The saved state of a trained optimizer → states of transformations, to continue from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from torchopt_dist.core.types import OptState
from torchopt_dist.optim._checkpoint import flatten_with_keys, key_of, restore_state
from torchopt_dist.optim._layout import COUNT
from torchopt_dist.transform.base import GradientTransformation

__all__ = ["is_of_an_optimizer", "trained_states"]


def is_of_an_optimizer(state_dict: Mapping[str, Any]) -> bool:
    """Whether it is the ``state_dict`` of a ``torch.optim.Optimizer``, torch's or ours."""
    return "param_groups" in state_dict


def trained_states(
    impls: Sequence[GradientTransformation],
    modules: Sequence[nn.Module],
    state_dict: Mapping[str, Any],
) -> list[OptState]:
    """Make the states of transformations from an optimizer's.

    Args:
        impls: a transformation for each group.
        modules: the modules whose parameters they move, in the order in which the optimizer was given them.
        state_dict: the optimizer's ``state_dict()``; its options are ignored.

    Raises:
        ValueError: the optimizer had another number of parameters, other shapes, or another kind of state.
    """
    groups: list[dict[str, Tensor]] = [dict(module.named_parameters()) for module in modules]
    saved = state_dict["param_groups"]
    ids = [index for group in saved for index in group["params"]]
    if len(ids) != sum(map(len, groups)):
        raise ValueError(
            f"`state_dict` must be of an optimizer of the modules' {sum(map(len, groups))} parameters, got one of "
            f"{len(ids)}"
        )
    held = iter([state_dict["state"].get(index, {}) for index in ids])
    made = next((float(group["lr_step"]) for group in saved if "lr_step" in group), None)
    return [
        _state(impl, params, {name: next(held) for name in params}, made)
        for impl, params in zip(impls, groups, strict=True)
    ]


def _state(
    impl: GradientTransformation,
    params: Mapping[str, Tensor],
    held: Mapping[str, Mapping[str, Any]],
    made: float | None,
) -> OptState:
    like = impl.init(params)
    paths, leaves, _ = flatten_with_keys(like)
    if made is None:  # steps made so far; torch says so of each parameter
        counts = [one[COUNT] for one in held.values() if COUNT in one]
        made = max(map(float, counts), default=None)
    fields = [path[-2:] for path, leaf in zip(paths, leaves, strict=True) if isinstance(leaf, Tensor)]
    flat: dict[str, Any] = {}
    for path, first in zip(paths, leaves, strict=True):
        own = held.get(path[-1]) if len(path) > 1 else None
        field = path[-2] if fields.count(path[-2:]) == 1 else key_of(path[:-1])
        if not isinstance(first, Tensor):
            found: Any = first
        elif own is None:
            found = first.new_tensor(made) if path[-1] == COUNT and made is not None else first
        elif not own or (field in own and own[field] is None):
            found = first
        elif field == COUNT and field not in own:  # torch's SGD does not count
            found = first.new_tensor(1)
        elif field not in own:
            raise ValueError(
                f"`state_dict` must have {field!r} of each parameter, or be of an optimizer like this one; of "
                f"{path[-1]!r} it has {sorted(own)}"
            )
        else:
            found = first.new_tensor(float(own[field])) if field == COUNT else own[field]
        flat[key_of(path)] = found
    return restore_state(like, flat)
