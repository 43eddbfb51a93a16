"""A schedule, an optimizer → a ``torch.optim.lr_scheduler``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchopt_dist.core.types import Numeric, Schedule

__all__ = ["ScheduleLR"]


class ScheduleLR(LRScheduler):
    """Set the learning rate of each group to the value of a schedule.

    After ``t`` calls of ``step`` it is ``schedule(t)``, whatever it was before.

    Args:
        optimizer: any ``torch.optim.Optimizer`` whose groups have an ``lr``. A number stays a number; a tensor stays
            the same tensor and is filled in place.
        schedule: a schedule for all groups, or a list of schedules, one for each group.
        last_epoch: the number of the last step made; -1 to start from the beginning.

    Raises:
        TypeError: ``optimizer`` is not an optimizer, ``schedule`` is not a schedule, or a group's ``lr`` is a schedule
            already.
        ValueError: there are not as many schedules as groups, or a group has no ``lr``.

    Example:
        >>> import torch
        >>> from torchopt_dist.schedule.transitions import linear_schedule
        >>> optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0)
        >>> scheduler = ScheduleLR(optimizer, linear_schedule(0.5, 0.0, 4))
        >>> optimizer.step()
        >>> scheduler.step()
        >>> scheduler.get_last_lr()
        [0.375]
    """

    def __init__(
        self, optimizer: Optimizer, schedule: Schedule | Sequence[Schedule], last_epoch: int = -1
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"`optimizer` must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        for index, group in enumerate(optimizer.param_groups):
            if "lr" not in group:
                raise ValueError(f"`optimizer` must have an `lr` in each group, got none in group {index}")
            if callable(group["lr"]) or "scheduled_lr" in group:
                raise TypeError(
                    f"`optimizer` must have a number or a tensor as `lr`, got a schedule in group {index}, "
                    f"which steps by itself"
                )
        self.schedule: Schedule | list[Schedule] = _checked(schedule)
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | Tensor]:
        """The learning rate of each group at step ``last_epoch``.

        Raises:
            ValueError: there are not as many schedules as groups, or one returned several elements.
        """
        groups = self.optimizer.param_groups
        schedules = self.schedule if isinstance(self.schedule, list) else [self.schedule] * len(groups)
        if len(schedules) != len(groups):
            raise ValueError(
                f"`schedule` must be one schedule, or one for each group: {len(groups)}, got {len(schedules)}"
            )
        return [
            _of_kind(group["lr"], schedule(self.last_epoch))
            for group, schedule in zip(groups, schedules, strict=True)
        ]

    def state_dict(self) -> dict[str, Any]:
        """The state as a dictionary, without the optimizer and the schedules, which are code."""
        return {name: value for name, value in super().state_dict().items() if name != "schedule"}


def _checked(schedule: Any) -> Schedule | list[Schedule]:
    if callable(schedule):
        return schedule
    if not isinstance(schedule, (list, tuple)):
        raise TypeError(
            f"`schedule` must be a schedule or a list of schedules, got {type(schedule).__name__}"
        )
    for index, one in enumerate(schedule):
        if not callable(one):
            raise TypeError(f"`schedule[{index}]` must be callable, got {type(one).__name__}")
    return list(schedule)


def _of_kind(lr: float | Tensor, value: Numeric) -> float | Tensor:
    """A schedule's value for a group: without its graph, a number if the group has one."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"`schedule` must return one element, got shape {tuple(value.shape)}")
        value = value.detach()
    return value if isinstance(lr, Tensor) else float(value)
