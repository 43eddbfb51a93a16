"""An op on lists → a whole step of an optimizer's chain, in place or recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from torchopt_dist import pytree
from torchopt_dist.ops.columns import as_complex, as_real, pick, present, put
from torchopt_dist.transform.base import InPlaceFn, RecordedFn
from torchopt_dist.transform.hyperparameters import is_number
from torchopt_dist.typing import OptState, Params, Updates

__all__ = ["in_place", "recorded"]


def in_place(op: Callable[..., None], **options: Any) -> InPlaceFn | None:
    """Make a step in place.

    Args:
        op: takes lists of real tensors, and overwrites them: parameters, gradients, and by name the fields of the
            links' states, ``exp_avgs`` for ``exp_avg``; and the options.
        options: the hyper-parameters, and whatever else it takes.

    Returns:
        The step; or ``None`` if an option is a tensor or a schedule, which such an op does not take.
    """
    given = {name: value for name, value in options.items() if value is not None}
    return partial(_step_in_place, op, given) if is_number(*given.values()) else None


def recorded(
    op: Callable[..., tuple[list[Any], ...]], *state_types: type[Any] | None, **options: Any
) -> RecordedFn | None:
    """Make a step that can be differentiated.

    Args:
        op: takes lists of real tensors: gradients, parameters by the name ``params``, the fields of these links'
            states by theirs (``exp_avgs`` for ``exp_avg``) where they are not ``()``, and the options; gives the moved
            parameters and the next fields, in the order of the chain.
        state_types: the types of those links' states, ``None`` for a link left out; the other links have no state.
        options: as for :func:`in_place`.

    Returns:
        The step; or ``None`` as for :func:`in_place`.
    """
    given = {name: value for name, value in options.items() if value is not None}
    types = tuple(kind for kind in state_types if kind is not None)
    return partial(_step_recorded, op, types, given) if is_number(*given.values()) else None


def _step_in_place(
    op: Callable[..., None],
    options: dict[str, Any],
    params: Sequence[Any],
    grads: Sequence[Any],
    state: OptState,
    /,
) -> None:
    fields = {f"{name}s": field for own in state for name, field in zip(own._fields, own, strict=True)}
    columns = {name: _leaves(field) for name, field in fields.items()}
    picked = {name: column for name, column in columns.items() if column}
    given = [list(params), list(grads)]
    places = present(grads)
    if len(places) < len(grads):
        picked = {name: pick(column, places) for name, column in picked.items()}
        given = [pick(column, places) for column in given]
    if any(map(Tensor.is_complex, given[0])):
        given = [as_real(column) for column in given]
        picked = {name: as_real(column) for name, column in picked.items()}
    op(*given, **picked, **options)


def _leaves(field: Any) -> list[Any]:
    """The leaves of a field. It mostly is a list of tensors, which to look at is a tenth of taking it apart."""
    return field if type(field) is list and {*map(type, field)} == {Tensor} else pytree.flatten(field)[0]


def _step_recorded(
    op: Callable[..., tuple[list[Any], ...]],
    state_types: tuple[type[Any], ...],
    options: dict[str, Any],
    params: Params,
    grads: Updates,
    state: OptState,
    /,
) -> tuple[Params, OptState]:
    leaves, spec = pytree.flatten(params)
    slopes = pytree.flatten_like(spec, grads, "updates", "params")
    places = present(slopes)
    fields = {
        (link, name): pytree.flatten_like(spec, field, f"state.{name}", "updates")
        for link, own in enumerate(state)
        if isinstance(own, state_types)
        for name, field in zip(own._fields, own, strict=True)
        if not (leaves and type(field) is tuple and not field)
    }
    before = [pick(column, places) for column in (leaves, *fields.values())]
    given = [pick(slopes, places), *before]
    some_are_complex = any(x.is_complex() for x in before[0])
    if some_are_complex:
        given = [as_real(column) for column in given]
    grads_, params_, *old = given
    named = {f"{name}s": column for (_, name), column in zip(fields, old, strict=True)}
    made = op(grads_, params=params_, **named, **options)
    if some_are_complex:
        made = tuple(as_complex(new, like) for new, like in zip(made, before, strict=True))
    moved, *after = (
        pytree.unflatten(spec, put(column, places, new))
        for column, new in zip((leaves, *fields.values()), made, strict=True)
    )
    changed = dict(zip(fields, after, strict=True))
    return moved, tuple(
        type(own)(*(changed.get((link, name), field) for name, field in zip(own._fields, own, strict=True)))
        if isinstance(own, state_types)
        else own
        for link, own in enumerate(state)
    )
