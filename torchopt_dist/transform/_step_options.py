"""Hyper-parameters of a fused step, the state of its links → the numbers that its op takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchopt_dist.core.types import OptState, ScalarOrSchedule, Schedule
from torchopt_dist.transform._hyperparameters import check_said

__all__ = ["Rate", "StepOptions"]


class Rate(NamedTuple):
    """The learning rate of a step."""

    value: Tensor | float | None
    """A tensor with its graph, or a number; ``None``: it is among the other numbers."""
    state: OptState
    """The states of the links, without that of a schedule."""
    counted: Any | None
    """That of a schedule, which counts steps."""


@dataclass(frozen=True, slots=True)
class StepOptions:
    """What an op of a fused step takes beside tensors."""

    numbers: dict[str, Any]
    schedule: Schedule | Tensor | None = None
    """What gives ``lr``, if that is not a number: a schedule, which is the last link, or a tensor of one element."""

    def rate(self, state: OptState) -> Rate:
        """Find the learning rate of the step after a state."""
        if self.schedule is None:
            return Rate(None, state, None)
        if isinstance(self.schedule, Tensor):
            return Rate(self.schedule.reshape(()), state, None)
        *before, counted = state
        lr = check_said("lr", self.schedule(counted.step.to(torch.float64)))
        return Rate(lr.reshape(()) if isinstance(lr, Tensor) else float(lr), tuple(before), counted)

    def with_rate(self, rate: Rate) -> dict[str, Any]:
        """The numbers, that of the learning rate among them."""
        return self.numbers if rate.value is None else {**self.numbers, "lr": float(rate.value)}

    def with_learning_rate(self, lr: ScalarOrSchedule) -> StepOptions:
        """The same with another number or schedule."""
        rest = {name: value for name, value in self.numbers.items() if name != "lr"}
        return StepOptions(rest, lr) if callable(lr) else StepOptions({**rest, "lr": lr})
