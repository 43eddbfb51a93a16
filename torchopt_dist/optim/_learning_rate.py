"""A parameter group whose ``lr`` is a schedule → a number as ``lr``, with the schedule and its count beside it.

So all readers of a group find a number: loggers, torch's schedulers, checkpoints. The schedule sets the number after
each step, to the rate of the next one. If other code has set another number, that number is used, and the schedule is
suspended.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchopt_dist.core.types import ScalarOrSchedule, Schedule
from torchopt_dist.transform._hyperparameters import check_at_least_zero, check_said, is_per_leaf
from torchopt_dist.transform.base import ChainedGradientTransformation, GradientTransformation
from torchopt_dist.transform.scale import learning_rate_of, scale_by_learning_rate

__all__ = ["Schedules", "found", "with_learning_rate"]

_COUNT = "lr_step"
_SAID = "scheduled_lr"
_KEYS = ("lr", _COUNT, _SAID)
"""What a group has for its learning rate: the number, the steps by the schedule, and what that last said."""
_OF_A_SCHEDULER = "initial_lr"
"""What torch's schedulers leave in a group; each computes its next rate from the last one."""


class Schedules(dict[int, Schedule]):
    """Index of a parameter group → the schedule of its ``lr``; code, which no ``state_dict`` has."""

    def settle(self, index: int, group: dict[str, Any]) -> None:
        """Replace a group's ``lr`` by a number, if it is a schedule; a count that exists is continued.

        Raises:
            ValueError: the number is below 0.
        """
        if callable(group.get("lr")):
            self[index] = group["lr"]
            group.setdefault(_COUNT, torch.zeros((), dtype=torch.int64, device="cpu"))
            self._say(index, group)
            check_at_least_zero("lr", group["lr"])

    def rules(self, index: int, group: dict[str, Any]) -> bool:
        """Whether the group's ``lr`` is the schedule's value, and neither other code nor torch's schedulers set it."""
        if index not in self or _OF_A_SCHEDULER in group or isinstance(group["lr"], Tensor):
            return False
        return bool(group["lr"] == group[_SAID])

    def advance(self, index: int, group: dict[str, Any]) -> None:
        """Count a step that was made with the schedule's rate, and set the next rate."""
        group[_COUNT] += 1
        self._say(index, group)

    def fill_in(self, index: int, group: dict[str, Any], saved: dict[str, Any]) -> None:
        """Add missing entries to a saved group, if the group that loads it has a schedule."""
        if index in self:
            saved.update({name: group[name] for name in _KEYS if name not in saved})

    def restore(self, index: int, group: dict[str, Any]) -> None:
        """After loading a group: its own schedule sets the rate, if the saved rate came from a schedule."""
        self.settle(index, group)
        if index not in self:
            group.pop(_SAID, None)
        elif self.rules(index, group):
            group[_COUNT] = group[_COUNT].cpu()
            self._say(index, group)

    def _say(self, index: int, group: dict[str, Any]) -> None:
        # A decorator would import the compiler with the package, which takes as long as torch.
        say = torch.compiler.disable(self._say_as_is) if torch.compiler.is_compiling() else self._say_as_is
        say(index, group)

    def _say_as_is(self, index: int, group: dict[str, Any]) -> None:
        with torch.no_grad():
            value = check_said("lr", self[index](group[_COUNT].to(torch.float64)))
        group["lr"] = group[_SAID] = float(value.detach() if isinstance(value, Tensor) else value)


def found(impl: GradientTransformation) -> ScalarOrSchedule | None:
    """The learning rate of a transformation; ``None`` where no link has one, or more than one, or one for each leaf."""
    links = impl.transformations if isinstance(impl, ChainedGradientTransformation) else (impl,)
    rates = [rate for link in links if (rate := learning_rate_of(link)) is not None]
    return None if len(rates) != 1 or is_per_leaf(rates[0]) else rates[0]


def with_learning_rate(impl: GradientTransformation, lr: ScalarOrSchedule) -> GradientTransformation:
    """The transformation with another learning rate in the place of the one that :func:`found` finds."""
    new = scale_by_learning_rate(lr)
    if not isinstance(impl, ChainedGradientTransformation):
        return new
    links = [link if learning_rate_of(link) is None else new for link in impl.transformations]
    return ChainedGradientTransformation(*links, fused_step=impl.fused_step.with_learning_rate(lr))
