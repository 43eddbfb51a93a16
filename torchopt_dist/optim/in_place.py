"""An op on lists → the ``in_place`` of an optimizer's chain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torchopt_dist import pytree
from torchopt_dist.ops import lists
from torchopt_dist.transform.base import InPlaceFn
from torchopt_dist.transform.hyperparameters import is_number
from torchopt_dist.typing import OptState

__all__ = ["in_place"]


def in_place(op: Callable[..., None], **options: Any) -> InPlaceFn | None:
    """Make a whole step of an optimizer from an op.

    Args:
        op: takes lists of real tensors, and overwrites them: parameters, gradients, and by name the fields of the
            links' states, ``exp_avgs`` for ``exp_avg``; and the options.
        options: the hyper-parameters, and whatever else it takes.

    Returns:
        The step; or ``None`` if an option is a tensor or a schedule, which such an op does not take.
    """
    given = {name: value for name, value in options.items() if value is not None}
    return partial(_step, op, given) if is_number(*given.values()) else None


def _step(
    op: Callable[..., None],
    options: dict[str, Any],
    params: Sequence[Any],
    grads: Sequence[Any],
    state: OptState,
    /,
) -> None:
    places = lists.present(grads)
    fields = {f"{name}s": field for own in state for name, field in zip(own._fields, own, strict=True)}
    columns = {name: pytree.flatten(field)[0] for name, field in fields.items()}
    picked = {name: lists.pick(column, places) for name, column in columns.items() if column}
    given = [lists.pick(column, places) for column in (params, grads)]
    if any(p.is_complex() for p in given[0]):
        given = [lists.as_real(column) for column in given]
        picked = {name: lists.as_real(column) for name, column in picked.items()}
    op(*given, **picked, **options)
