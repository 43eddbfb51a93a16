"""An optimizer's state → plain dicts that ``torch.load(weights_only=True)`` reads, and back.

The key of a tensor is its path in the state: ``'0/momentum_buffer/0.weight'`` is the parameter ``0.weight`` in the
field ``momentum_buffer`` of the chain's first link. In a name, ``~`` and ``/`` are written ``~0`` and ``~1``, as in a
JSON pointer [RFC 6901], so that no two places have one key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
from torch import Tensor

from torchopt_dist.core.types import OptState
from torchopt_dist.pytree import PyTreeSpec

__all__ = ["flatten_state", "flatten_with_keys", "key_of", "restore_state"]


def flatten_with_keys(
    state: OptState, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[tuple[str, ...]], list[Any], PyTreeSpec]:
    """The path to each leaf of a state, the leaves, and the structure."""
    accessors, leaves, spec = optree.tree_flatten_with_accessor(state, is_leaf, none_is_leaf=True)
    paths = [tuple(str(getattr(entry, "field", entry.entry)) for entry in path) for path in accessors]
    return paths, leaves, spec


def flatten_state(state: OptState) -> dict[str, Any]:
    """Turn a state into a flat dict; the tensors are the same."""
    paths, leaves, _ = flatten_with_keys(state)
    return {key_of(path): leaf for path, leaf in zip(paths, leaves, strict=True)}


def restore_state(like: OptState, saved: dict[str, Any]) -> OptState:
    """Turn a flat dict into a state.

    Args:
        like: a state of the optimizer that continues.
        saved: from :func:`flatten_state`; its tensors are taken as they are, moved to the device and the
            dtype of their places and requiring grad where these do.

    Raises:
        ValueError: the keys or a shape differ: it is the state of another optimizer.
    """
    paths, leaves, spec = flatten_with_keys(like)
    keys = [key_of(path) for path in paths]
    if saved.keys() != set(keys):
        missing, extra = sorted(set(keys) - saved.keys()), sorted(saved.keys() - set(keys))
        raise ValueError(
            f"`state_dict` must be of an optimizer like this one; it lacks {missing}, has too much {extra}"
        )
    fitted = [_fit(key, leaf, saved[key]) for key, leaf in zip(keys, leaves, strict=True)]
    return optree.tree_unflatten(spec, fitted)


def key_of(path: tuple[str, ...]) -> str:
    """The key of a path: its names, with a slash between them."""
    return "/".join(name.replace("~", "~0").replace("/", "~1") for name in path)


def _fit(key: str, like: Any, saved: Any) -> Any:
    if not isinstance(like, Tensor):
        return saved
    if not isinstance(saved, Tensor) or saved.shape != like.shape:
        got = tuple(saved.shape) if isinstance(saved, Tensor) else type(saved).__name__
        raise ValueError(f"`state_dict` must have shape {tuple(like.shape)} at {key!r}, got {got}")
    fitted = saved.to(device=like.device, dtype=like.dtype)
    if fitted.grad_fn is None and fitted.requires_grad != like.requires_grad:
        fitted = fitted.detach().requires_grad_(like.requires_grad)
    return fitted
