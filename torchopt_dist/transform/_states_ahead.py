"""A state, the gradients of several steps → for each step a state that is enough to go back through it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from torchopt_dist import pytree
from torchopt_dist.ops._adam_backward import AHEAD
from torchopt_dist.ops._columns import pick, present, put
from torchopt_dist.transform._pulled_step import learning_rate
from torchopt_dist.typing import OptState, Schedule

__all__ = ["states_ahead"]


def states_ahead(
    op: Callable[..., bool],
    state_types: tuple[type[Any], ...],
    schedule: Schedule | Tensor | None,
    options: dict[str, Any],
    state: OptState,
    grads: Sequence[Sequence[Any]],
    memory_for: Callable[[Tensor], Tensor],
    /,
) -> list[OptState] | None:
    """See :class:`~torchopt_dist.transform._pulled_step.AheadFn`; the other arguments are those of ``fused_step``."""
    places = present(grads[0])
    others = {name for own in state if not isinstance(own, state_types) for name in own._fields}
    if not places or others - {"step"} or any(present(of_step) != places for of_step in grads):
        return None
    number = learning_rate(schedule, state)
    options = options if number is None else {**options, "lr": float(number)}
    made = [state]
    for start in range(0, len(grads), AHEAD):
        columns = [pick(of_step, places) for of_step in grads[start : start + AHEAD]]
        base = made[start]
        made += [_counted(base, state_types, places, by) for by in range(1, len(columns))]
        is_last = start + AHEAD >= len(grads)
        after = _averaged(op, base, state_types, places, columns, options, None if is_last else memory_for)
        if after is None:
            return None
        if not is_last:
            made.append(_counted(after, state_types, places, AHEAD))
    return made


def _counted(state: OptState, state_types: tuple[type[Any], ...], places: list[int], by: int) -> OptState:
    """A state in which so many more steps are counted, of the parameters at these places."""
    made = []
    for own in state:
        if "step" in own._fields:
            leaves, spec = pytree.flatten(own.step)
            which = places if isinstance(own, state_types) else range(len(leaves))
            more = [count + by for count in pick(leaves, which)]
            own = own._replace(step=pytree.unflatten(spec, put(leaves, which, more)))
        made.append(own)
    return tuple(made)


def _averaged(
    op: Callable[..., bool],
    state: OptState,
    state_types: tuple[type[Any], ...],
    places: list[int],
    columns: list[list[Tensor]],
    options: dict[str, Any],
    memory_for: Callable[[Tensor], Tensor] | None,
) -> OptState | None:
    """A state with gradients of steps taken into its fields, if there is memory for it; its counts stay."""
    (own,) = (own for own in state if isinstance(own, state_types))
    fields = {name: pytree.flatten(field) for name, field in own._asdict().items() if name != "step"}
    old = {name: pick(leaves, places) for name, (leaves, _) in fields.items()}
    new = [None if memory_for is None else [memory_for(leaf) for leaf in column] for column in old.values()]
    if not op(*new, grads=columns, **{f"{name}s": column for name, column in old.items()}, **options):
        return None
    changed = {
        name: pytree.unflatten(spec, put(leaves, places, column))
        for (name, (leaves, spec)), column in zip(fields.items(), new, strict=True)
        if column is not None
    }
    return tuple(own._replace(**changed) if isinstance(one, state_types) else one for one in state)
