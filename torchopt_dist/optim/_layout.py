"""A transformation's state → for each leaf its parameter, key and dtype, or that it is the group's."""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchopt_dist import pytree
from torchopt_dist.core.types import OptState
from torchopt_dist.optim._checkpoint import flatten_with_keys, key_of
from torchopt_dist.optim._dtypes import converted

__all__ = ["COUNT", "Layout", "counts", "fit_dtypes", "is_list", "layout_of", "sort_of"]

COUNT = "step"


class Layout(NamedTuple):
    """The places of the leaves of a transformation's state."""

    spec: pytree.PyTreeSpec
    """Structure of the state, its lists (a tensor for each parameter) taken as leaves."""
    keys: list[str | None]
    """A leaf's key in ``state[p]``; ``None`` for a leaf of the whole group, which is in ``group['shared_state']``."""
    paths: list[str]
    """A leaf's place in the state, which is its key there."""
    holders: dict[str, list[bool]]
    """For each key whether each parameter, in the group's order, has it; Adafactor's depend on the dimensions."""

    def columns(self, states: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
        """Each key → what the parameters have under it, ``None`` for those that do not have it.

        Raises:
            KeyError: a parameter lacks what it should have.
        """
        return {
            key: [state[key] if holds else None for state, holds in zip(states, own, strict=True)]
            for key, own in self.holders.items()
        }

    def shared(self, state: OptState) -> dict[str, Any]:
        """The leaves of the whole group in a state, by their keys."""
        leaves = flatten_with_keys(state, is_list)[1]
        return {
            path: leaf for key, path, leaf in zip(self.keys, self.paths, leaves, strict=True) if key is None
        }


def layout_of(state: OptState) -> Layout:
    paths, leaves, spec = flatten_with_keys(state, is_list)
    own = [path if is_list(leaf) else None for path, leaf in zip(paths, leaves, strict=True)]
    names = [path[-1] for path in own if path]  # a count of the whole group takes no name away
    keys = [None if path is None else _key(path, names) for path in own]
    holders = {
        key: [value is not None for value in leaf]
        for key, leaf in zip(keys, leaves, strict=True)
        if key is not None
    }
    return Layout(spec, keys, [key_of(path) or "state" for path in paths], holders)


def _key(path: tuple[str, ...], names: list[str]) -> str:
    if not path:
        return "state"
    return path[-1] if names.count(path[-1]) == 1 else key_of(path)


def is_list(part: Any) -> bool:
    return type(part) is list


def fit_dtypes(layout: Layout, first: OptState, states: Sequence[dict[str, Any]]) -> None:
    """Convert parameters' states to the dtypes of a first state, as ``load_state_dict`` does.

    Converting a module, by ``module.double()`` for example, does not convert the states of its parameters.

    Args:
        layout: the layout of the state.
        first: the first state of the parameters as they are now; only its dtypes count.
        states: a dict for each parameter, which is changed; what it lacks stays away.

    Raises:
        ValueError: a real parameter has become a complex one, or the other way round.
    """
    leaves = flatten_with_keys(first, is_list)[1]
    for key, column in zip(layout.keys, leaves, strict=True):
        if key is None:
            continue
        for place, (held, like) in enumerate(zip(states, column, strict=True)):
            if key in held:
                held[key] = converted(held[key], like, f"{key!r} of parameter {place} of its group")


def sort_of(option: Any) -> tuple[type, str]:
    """An option's type, and whether it is on; a text, as ``torch.compile`` cannot keep a symbolic bool in a list."""
    return type(option), "on" if not isinstance(option, numbers.Real) or option != 0 else "off"


def counts(state: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The counts of a saved state as tensors, with their keys; torch before 1.12 saved numbers.

    They are on the CPU, so that reading them waits for no GPU.

    Torch takes only a key that is ``'step'`` for one; it casts others to the parameter's dtype, and in half
    precision a count then stands still at 256 or 2048.
    """
    for key, value in state.items():
        if str(key).rpartition("/")[2] != COUNT:
            continue
        if isinstance(value, Tensor) and not value.is_meta:
            yield key, value.cpu()
        elif isinstance(value, (int, float)) and type(value) is not bool:
            yield key, torch.tensor(float(value), dtype=torch.float32, device="cpu")
