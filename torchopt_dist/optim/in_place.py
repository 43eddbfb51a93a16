"""An op on lists, the state it uses → the ``in_place`` of an optimizer's chain."""

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


def in_place(op: Callable[..., None], state_type: type, **options: Any) -> InPlaceFn | None:
    """Make a whole step of an optimizer from an op.

    Args:
        op: takes parameters, gradients and the fields of a state, lists of real tensors, and the options by name;
            overwrites them.
        state_type: the type of the state it uses; if none of the chain's is of it, the op gets no fields.
        options: the hyper-parameters, and whatever else it takes.

    Returns:
        The step; or ``None`` if an option is a tensor or a schedule, which such an op does not take.
    """
    numbers = [value for value in options.values() if value is not None]
    return partial(_step, op, state_type, options) if is_number(*numbers) else None


def _step(
    op: Callable[..., None],
    state_type: type,
    options: dict[str, Any],
    params: Sequence[Any],
    grads: Sequence[Any],
    state: OptState,
    /,
) -> None:
    places = lists.present(grads)
    fields: Any = next((own for own in state if isinstance(own, state_type)), ())
    columns = [params, grads, *(pytree.flatten(field)[0] for field in fields)]
    op(*(lists.as_real(lists.pick(column, places)) if column else [] for column in columns), **options)
