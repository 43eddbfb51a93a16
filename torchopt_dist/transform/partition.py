"""Transformations by label, a label for each leaf → each leaf transformed by the one that its label names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from torchopt_dist import pytree
from torchopt_dist.core.types import OptState, Params, Updates
from torchopt_dist.transform.base import GradientTransformation, of_elements

__all__ = ["Labels", "PartitionState", "partition"]

Labels: TypeAlias = Any | Callable[[Params], Any]
"""A tree of texts of the parameters' structure, or a function from the parameters to one."""


class PartitionState(NamedTuple):
    """The state of :func:`partition`."""

    inner_states: dict[str, OptState]
    """The state of each transformation, by its label, with ``None`` at the leaves of the others."""


def partition(
    transformations: Mapping[str, GradientTransformation], labels: Labels
) -> GradientTransformation:
    """Transform each leaf by the transformation of its label.

    A transformation that combines all updates, as :func:`clip_grad_norm` does in its norm, combines
    those of its label only.

    Args:
        transformations: the transformations by label.
        labels: a label for each leaf: a tree of texts of the parameters' structure (a list for an
            :class:`~torchopt_dist.Optimizer`, a dictionary by full name for a
            :class:`~torchopt_dist.MetaOptimizer`), or a function from the parameters to such a tree (a module-level
            one, if the transformation is to be pickled). The function runs in ``init`` and in each ``update``, so
            its answer must stay the same: it may look at names and shapes, not at values.

    Raises:
        TypeError: ``transformations`` is not a mapping from texts to gradient transformations.
        ValueError: there are none; from ``init`` and ``update``: a label is none of ``transformations``, the labels
            have another structure, or are a function and ``params`` are missing.

    Example:
        >>> import torch
        >>> from torchopt_dist.transform.scale import scale
        >>> init, update = partition({"slow": scale(-0.1), "fast": scale(-1.0)}, {"w": "slow", "b": "fast"})
        >>> gradients = {"w": torch.ones(1), "b": torch.ones(1)}
        >>> update(gradients, init(gradients))[0]
        {'w': tensor([-0.1000]), 'b': tensor([-1.])}
    """
    if not isinstance(transformations, Mapping):
        raise TypeError(f"`transformations` must be a mapping, got {type(transformations).__name__}")
    if not transformations:
        raise ValueError("`transformations` must have an entry, got none")
    for label, inner in transformations.items():
        if not isinstance(label, str) or not isinstance(inner, GradientTransformation):
            raise TypeError(
                "`transformations` must map texts to GradientTransformations, got "
                f"{type(label).__name__} {label!r} → {type(inner).__name__}"
            )
    parts = dict(transformations)
    return GradientTransformation(partial(_init, parts, labels), partial(_update, parts, labels))


def _init(parts: dict[str, GradientTransformation], labels: Labels, params: Params, /) -> PartitionState:
    leaves, spec = pytree.flatten(params)
    named = _labels_of(spec, labels, params, parts)
    return PartitionState(
        {label: inner.init(_of_label(spec, leaves, named, label)) for label, inner in parts.items()}
    )


@of_elements(masks=True)
def _update(
    parts: dict[str, GradientTransformation],
    labels: Labels,
    updates: Updates,
    state: PartitionState,
    *,
    params: Params | None = None,
    inplace: bool = False,
) -> tuple[Updates, OptState]:
    if not isinstance(state, PartitionState) or state.inner_states.keys() != parts.keys():
        raise TypeError(f"`state` must be a PartitionState of {list(parts)}, got {state!r:.200}")
    leaves, spec = pytree.flatten(updates)
    if params is not None:
        pytree.flatten_like(spec, params, "params", "updates")
    named = _labels_of(spec, labels, params, parts)
    moved, states = list(leaves), {}
    for label, inner in parts.items():
        made, states[label] = inner.update(
            _of_label(spec, leaves, named, label), state.inner_states[label], params=params, inplace=inplace
        )
        own = pytree.flatten_like(spec, made, f"the updates of {label!r}", "updates")
        moved = [new if name == label else old for new, old, name in zip(own, moved, named, strict=True)]
    return pytree.unflatten(spec, moved), PartitionState(states)


def _of_label(spec: pytree.PyTreeSpec, leaves: list[Any], named: list[str], label: str) -> Any:
    """The tree with ``None`` for the leaves of other labels."""
    own = [leaf if name == label else None for leaf, name in zip(leaves, named, strict=True)]
    return pytree.unflatten(spec, own)


def _labels_of(
    spec: pytree.PyTreeSpec, labels: Labels, params: Params | None, parts: Mapping[str, Any]
) -> list[str]:
    if callable(labels) and params is None:
        raise ValueError("`params` must be given to `update`: the labels are a function of them, got None")
    tree: Any = labels(params) if callable(labels) else labels
    try:
        named: list[Any] = spec.flatten_up_to(tree)
    except ValueError as error:
        raise ValueError(
            f"`labels` must have the structure of `params`, {spec}, got {tree!r:.200}"
        ) from error
    for label in named:
        if not isinstance(label, str) or label not in parts:
            raise ValueError(f"`labels` must be among {list(parts)}, got {label!r:.80}")
    return named
