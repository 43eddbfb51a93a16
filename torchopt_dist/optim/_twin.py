"""A class of this package, options → those that only the class of the same name in ``torch.optim`` has, or an error."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any

import torch

__all__ = ["WAYS", "check_group", "take"]

WAYS = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Torch's choices between ways to compute the same; a group may have any of them."""


def take(
    names: Collection[str], own: Collection[str], kwargs: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of a constructor → the class's own, and those that only torch's class has.

    Args:
        names: the names of the classes that are ours, the class's own first.
        own: the class's own options.
        kwargs: the arguments.

    Raises:
        ValueError: an option is set that changes what a step does.
    """
    theirs = _options(names) - set(own)
    taken = {name: value for name, value in kwargs.items() if name in theirs}
    if taken.get("differentiable"):
        raise ValueError(
            f"`differentiable` must be off, got {taken['differentiable']!r}: Meta{next(iter(names))} makes steps "
            "that one can differentiate through"
        )
    return {name: value for name, value in kwargs.items() if name not in taken}, taken


def check_group(
    names: Collection[str], own: Collection[str], settled: Mapping[str, bool], group: Mapping[str, Any]
) -> None:
    """Check that a group sets no option that this optimizer does not have.

    Args:
        names: the names of the classes that are ours, the class's own first.
        own: the class's own options.
        settled: options of torch's classes that tell this class from another, and the value that they have here.
        group: the parameter group.

    Raises:
        ValueError: it sets such an option.
    """
    cls = next(iter(names), "Optimizer")
    for name in sorted((_options(names) | set(settled)) - set(own) - WAYS):
        if bool(group.get(name, settled.get(name, False))) != settled.get(name, False):
            state = "on" if settled.get(name) else "off"
            raise ValueError(
                f"`{name}` must be {state}, as this {cls} has no such option, got {group[name]!r}"
            )


def _options(names: Collection[str]) -> set[str]:
    """Arguments of the class of torch that has one of these names; none if there is no such class."""
    twins = [getattr(torch.optim, name) for name in names if hasattr(torch.optim, name)]
    return {name for twin in twins for name in inspect.signature(twin).parameters} - {"params"}
