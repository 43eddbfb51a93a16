"""A constructor of a transformation → one whose hyper-parameters are in the state, to be read, set, and scheduled."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchopt_dist import torch_private
from torchopt_dist.core.types import Numeric, OptState, Params, Schedule, Updates
from torchopt_dist.core.vmap import values_of
from torchopt_dist.transform.base import GradientTransformation, of_elements

__all__ = ["InjectHyperparamsState", "inject_hyperparams"]

Constructor = Callable[..., GradientTransformation]


class InjectHyperparamsState(NamedTuple):
    """The state of a transformation made by :func:`inject_hyperparams`."""

    step: Tensor
    """Updates made so far: 0-d, int64, on the CPU."""
    hyperparams: dict[str, Tensor]
    """The hyper-parameters of the next update: a 0-d float64 tensor each, on the CPU."""
    inner_state: OptState
    """The state of the transformation that the constructor makes."""


def inject_hyperparams(constructor: Constructor, static_args: Collection[str] = ()) -> Constructor:
    """Keep the hyper-parameters of a transformation in its state, so that any of them can be a schedule.

    Each argument that is a number or a function of the number of updates made so far is in ``state.hyperparams``, by
    its name, from the first state on. So a logger can read it, and a ``state_dict`` has it. To change a number, put
    another tensor in its place in the state. The value of a schedule is computed again after each update. As in optax.
    Where the state was cut from its graph, as by :class:`~torchopt_dist.Truncated`, an update computes the values of
    schedules once more, so that it is connected with tensors that they use.

    Args:
        constructor: a function such as :func:`~torchopt_dist.adam`.
        static_args: names of arguments that are passed on as they are: functions that are not schedules, such as a
            mask, and numbers that ``init`` reads, such as ``initial_scale``.

    Returns:
        A function with the arguments of ``constructor``. Arguments that are not given have its defaults and are not in
        the state; bools, tensors and tuples are not in the state either. The transformation that it makes gives
        ``constructor`` tensors of one element, so no term is left out where a hyper-parameter is 0, and no fused kernel
        runs.

    Raises:
        TypeError: ``constructor`` is not callable, or ``static_args`` has a name that it does not take.

    Example:
        >>> import torch
        >>> from torchopt_dist.optim.sgd import sgd
        >>> w = torch.ones(1)
        >>> impl = inject_hyperparams(sgd)(lr=0.5, momentum=lambda count: 0.5 + 0.25 * count)
        >>> _, state = impl.update(w, impl.init(w))
        >>> {name: value.item() for name, value in state.hyperparams.items()}
        {'lr': 0.5, 'momentum': 0.75}
    """
    if not callable(constructor):
        raise TypeError(f"`constructor` must be callable, got {type(constructor).__name__}")
    if unknown := sorted(set(static_args) - set(inspect.signature(constructor).parameters)):
        raise TypeError(f"`static_args` must be arguments of the constructor, got {unknown}")
    return partial(_construct, constructor, frozenset(static_args))


def _construct(
    constructor: Constructor, static_args: frozenset[str], *args: Any, **kwargs: Any
) -> GradientTransformation:
    given = inspect.signature(constructor).bind(*args, **kwargs).arguments
    injected = {
        name: value for name, value in given.items() if name not in static_args and _is_hyperparameter(value)
    }
    rest = {name: value for name, value in given.items() if name not in injected}
    first = _values(injected, torch.zeros((), device="cpu"))
    if torch_private.transforms_are_active():
        constructor(**rest, **first)
    else:  # so that values are checked, which those of tensors are not
        constructor(**rest, **{name: float(value.detach()) for name, value in first.items()})
    return GradientTransformation(
        partial(_init, constructor, injected, rest), partial(_update, constructor, injected, rest)
    )


def _is_hyperparameter(value: Any) -> bool:
    return callable(value) or (isinstance(value, numbers.Real) and not isinstance(value, bool))


def _values(injected: Mapping[str, float | Schedule], step: Tensor) -> dict[str, Tensor]:
    """The value of each hyper-parameter after so many updates."""
    count = step.to(torch.float64)
    return {name: _tensor(value(count) if callable(value) else value) for name, value in injected.items()}


def _tensor(value: Numeric) -> Tensor:
    if isinstance(value, Tensor):
        return value.reshape(()).to(device="cpu", dtype=torch.float64)
    return torch.tensor(value, dtype=torch.float64, device="cpu")


def _init(
    constructor: Constructor, injected: Mapping[str, Any], rest: Mapping[str, Any], params: Params, /
) -> InjectHyperparamsState:
    step = torch.zeros((), dtype=torch.int64, device="cpu")
    values = _values(injected, step)
    return InjectHyperparamsState(step, values, constructor(**rest, **values).init(params))


def _first_of(
    constructor: Constructor, injected: Mapping[str, Any], rest: Mapping[str, Any]
) -> GradientTransformation:
    return constructor(**rest, **_values(injected, torch.zeros((), device="cpu")))


@of_elements(inner=_first_of)
def _update(
    constructor: Constructor,
    injected: Mapping[str, Any],
    rest: Mapping[str, Any],
    updates: Updates,
    state: InjectHyperparamsState,
    *,
    params: Params | None = None,
    inplace: bool = False,
) -> tuple[Updates, OptState]:
    if not isinstance(state, InjectHyperparamsState):
        raise TypeError(f"`state` must be an InjectHyperparamsState, got {type(state).__name__}")
    scheduled = {name: value for name, value in injected.items() if callable(value)}
    hyperparams = state.hyperparams
    if scheduled and torch.is_grad_enabled():
        fresh = _values(scheduled, state.step)
        hyperparams = {
            **hyperparams,
            **{name: value for name, value in fresh.items() if _is_cut_from(hyperparams[name], value)},
        }
    inner = constructor(**rest, **hyperparams)
    updates, inner_state = inner.update(updates, state.inner_state, params=params, inplace=inplace)
    step = state.step + 1
    return updates, InjectHyperparamsState(
        step, {**state.hyperparams, **_values(scheduled, step)}, inner_state
    )


def _is_cut_from(held: Tensor, fresh: Tensor) -> bool:
    """Whether a value of the state is the one that a schedule gives with a graph, which it has itself no longer."""
    if torch_private.transform_level() > len(torch_private.vmaps()):
        return False  # inside `torch.func.grad` values cannot be looked at, and nothing is cut
    if values_of(held).values.requires_grad or not values_of(fresh).values.requires_grad:
        return False
    return not values_of(held - fresh.detach()).values.any()
