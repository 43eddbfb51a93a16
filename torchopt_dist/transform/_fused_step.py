"""Ops on lists of tensors → whole steps of an optimizer's chain, from gradients to moved parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchopt_dist import pytree
from torchopt_dist.core.types import OptState, Params, ScalarOrSchedule, Schedule, Updates
from torchopt_dist.ops._columns import as_complex, as_real, pick, present, put
from torchopt_dist.ops._foreach import runs_in_a_loop
from torchopt_dist.transform._hyperparameters import check_said, is_number, is_schedule

__all__ = ["FusedStep", "fused_step"]


def leaves_of(field: Any) -> list[Any]:
    """The leaves of a field. Most fields are lists of tensors: the check takes a tenth of the time of flattening."""
    return field if type(field) is list and {*map(type, field)} == {Tensor} else pytree.flatten(field)[0]


class Settled(NamedTuple):
    """What an op takes at a step, all that a schedule says for it found."""

    given: dict[str, Any]
    lr: Tensor | float | None
    """The learning rate, where it is not among the numbers that are given; a tensor may have a graph."""
    state: OptState
    """The states of the links, without that of a schedule."""
    counted: Any | None
    """That of a schedule, which counts steps."""

    @property
    def numbers(self) -> dict[str, Any]:
        return self.given if self.lr is None else {**self.given, "lr": float(self.lr)}


@dataclass(frozen=True, slots=True)
class StepOptions:
    """What an op of a fused step takes beside tensors."""

    given: dict[str, Any]
    schedule: Schedule | Tensor | None = None
    """What gives ``lr``, if that is not a number: a schedule, which is the last link, or a tensor of one element."""

    def settled(self, state: OptState) -> Settled:
        """The options of the step after a state."""
        if self.schedule is None or isinstance(self.schedule, Tensor):
            return Settled(self.given, self.schedule, state, None)
        *before, counted = state
        lr = check_said("lr", self.schedule(counted.step.to(torch.float64)))
        return Settled(self.given, lr, tuple(before), counted)

    def with_learning_rate(self, lr: ScalarOrSchedule) -> StepOptions:
        """The same with another number or schedule."""
        rest = {name: value for name, value in self.given.items() if name != "lr"}
        return StepOptions(rest, lr) if callable(lr) else StepOptions({**rest, "lr": lr})


@dataclass(frozen=True, slots=True)
class InPlaceStep:
    """Parameters, gradients, state → the parameters and the state are overwritten."""

    op: Callable[..., None]
    options: StepOptions

    def __call__(self, params: Sequence[Any], grads: Sequence[Any], state: OptState, /) -> None:
        """Make one step, without recording a graph.

        Args:
            params: the leaves of the parameters.
            grads: as many gradients; one that is ``None`` leaves its parameter and its state alone.
            state: the states of the links that the step stands for.
        """
        settled = self.options.settled(state)
        fields = {
            f"{name}s": field for own in settled.state for name, field in zip(own._fields, own, strict=True)
        }
        columns = {name: leaves_of(field) for name, field in fields.items()}
        picked = {name: column for name, column in columns.items() if column}
        given = [list(params), list(grads)]
        places = present(grads)
        if len(places) < len(grads):
            picked = {name: pick(column, places) for name, column in picked.items()}
            given = [pick(column, places) for column in given]
        if any(map(Tensor.is_complex, given[0])):
            if any(map(Tensor.is_conj, given[0])):
                raise ValueError(
                    "`params` must not be lazily conjugated to be moved in place, got one that is: make it of "
                    "`tensor.resolve_conj()`"
                )
            given = [as_real(column) for column in given]
            picked = {name: as_real(column) for name, column in picked.items()}
        self.op(*given, **picked, **settled.numbers)
        if settled.counted is not None:
            settled.counted.step.add_(1)


@dataclass(frozen=True, slots=True)
class DifferentiableStep:
    """Parameters, gradients, state → moved parameters, next state; or ``None``: the links are to run.

    That is where a schedule's value has a graph, or a learning rate that is a tensor may get a gradient.
    """

    op: Callable[..., tuple[list[Any], ...]]
    state_types: tuple[type[Any], ...]
    options: StepOptions

    def __call__(self, params: Params, grads: Updates, state: OptState, /) -> tuple[Params, OptState] | None:
        """Make one step that is recorded in the graph; nothing is overwritten.

        Args:
            params: the parameters, a tree.
            grads: a tree of their structure; one that is ``None`` leaves its parameter and its state alone.
            state: the states of the links that the step stands for.
        """
        settled = self.options.settled(state)
        if isinstance(settled.lr, Tensor):
            learns = torch.is_grad_enabled() if settled.counted is None else settled.lr.requires_grad
            if learns or runs_in_a_loop([settled.lr]):
                return None
        leaves, spec = pytree.flatten(params)
        grad_leaves = pytree.flatten_like(spec, grads, "updates", "params")
        places = present(grad_leaves)
        fields = {
            (link, name): pytree.flatten_like(spec, field, f"state.{name}", "updates")
            for link, own in enumerate(settled.state)
            if isinstance(own, self.state_types)
            for name, field in zip(own._fields, own, strict=True)
            if not (leaves and type(field) is tuple and not field)
        }
        before = [pick(column, places) for column in (leaves, *fields.values())]
        given = [pick(grad_leaves, places), *before]
        some_are_complex = any(map(Tensor.is_complex, before[0]))
        if some_are_complex:
            given = [as_real(column) for column in given]
        real_grads, real_params, *old = given
        named = {f"{name}s": column for (_, name), column in zip(fields, old, strict=True)}
        made = self.op(real_grads, params=real_params, **named, **settled.numbers)
        if some_are_complex:
            made = tuple(as_complex(new, like) for new, like in zip(made, before, strict=True))
        moved, *after = (
            pytree.unflatten(spec, put(column, places, new))
            for column, new in zip((leaves, *fields.values()), made, strict=True)
        )
        changed = dict(zip(fields, after, strict=True))
        state = tuple(
            type(own)(
                *(changed.get((link, name), field) for name, field in zip(own._fields, own, strict=True))
            )
            if isinstance(own, self.state_types)
            else own
            for link, own in enumerate(settled.state)
        )
        counted = settled.counted
        return moved, state if counted is None else (*state, type(counted)(counted.step + 1))


@dataclass(frozen=True, slots=True)
class FusedStep:
    """A chain's ``update`` and the addition to the parameters in one step, with fewer passes over the memory."""

    in_place: InPlaceStep | None = None
    """The step that overwrites parameters and state; ``None`` where none is known."""
    differentiable: DifferentiableStep | None = None
    """The step that is recorded in the graph."""
    first_link: int = 0
    """The steps stand for this link of the chain and all after it; the links before it run first, as they are."""
    of_gradients_alone: bool = False
    """What is added to the parameters is known to depend on nothing but gradients, the state and numbers."""
    gradient_factor: float | None = None
    """So many times the gradient is added to a parameter, and that is all; ``None`` where more is done."""

    def after(self, links: int) -> FusedStep:
        """The same steps, behind so many links more."""
        return replace(self, first_link=self.first_link + links)

    def with_learning_rate(self, lr: ScalarOrSchedule) -> FusedStep:
        """The same steps with another number, or schedule, as ``lr``; none, if that is a tensor."""
        if isinstance(lr, Tensor):
            return FusedStep()
        steps = {"in_place": self.in_place, "differentiable": self.differentiable}
        made: dict[str, Any] = {
            name: replace(step, options=step.options.with_learning_rate(lr))
            for name, step in steps.items()
            if step is not None
        }
        alone = self.of_gradients_alone and not is_schedule(lr)
        return replace(self, of_gradients_alone=alone, gradient_factor=None, **made)


def fused_step(
    in_place: Callable[..., None] | None,
    differentiable: Callable[..., tuple[list[Any], ...]] | None,
    *state_types: type[Any] | None,
    only_adds: bool = False,
    **options: Any,
) -> FusedStep | None:
    """Make the whole steps of a chain from two ops.

    Args:
        in_place: takes lists of real tensors and overwrites them: parameters, gradients, and by name the fields of the
            links' states, ``exp_avgs`` for ``exp_avg``; and the options.
        differentiable: takes lists of real tensors: gradients, parameters by the name ``params``, the fields of these
            links' states by theirs where they are not ``()``, and the options; gives the moved parameters and the next
            fields, in the order of the chain.
        only_adds: minus ``lr``, if that is a number, times the gradient is added to a parameter, and that is all.
        state_types: the types of those links' states, ``None`` for a link left out; the other links have no state.
        options: the hyper-parameters, and whatever else both ops take; one that is ``None`` is not passed. ``lr``
            may be a schedule, if the last link is the one that it makes, or a tensor of one element on the CPU: then
            the differentiable step is fused only where nothing is recorded.

    Returns:
        The steps; or ``None`` if another option is a tensor or a schedule, which the ops do not take.
    """
    given = {name: value for name, value in options.items() if value is not None or name == "lr"}
    lr = given["lr"]
    as_tensor = isinstance(lr, Tensor) and lr.numel() == 1 and lr.device.type == "cpu"
    schedule = given.pop("lr") if is_schedule(lr) or as_tensor else None
    if not is_number(*given.values()):
        return None
    types = tuple(kind for kind in state_types if kind is not None)
    numbers = StepOptions(given, schedule)
    overwriting = None if in_place is None else InPlaceStep(in_place, numbers)
    if differentiable is None:
        return FusedStep(overwriting)
    return FusedStep(
        overwriting,
        DifferentiableStep(differentiable, types, numbers),
        of_gradients_alone=schedule is None and not given.get("weight_decay", 0.0),
        gradient_factor=-lr if only_adds and schedule is None else None,
    )
