"""Step count → value: schedules, and the way from them to ``torch.optim.lr_scheduler``."""

from torchopt_dist.schedule.joined import join_schedules, one_cycle, warmup_cosine
from torchopt_dist.schedule.lr_scheduler import ScheduleLR
from torchopt_dist.schedule.transitions import (
    cosine_decay,
    exponential_decay,
    linear_schedule,
    piecewise_constant_schedule,
    polynomial_schedule,
)

__all__ = [
    "ScheduleLR",
    "cosine_decay",
    "exponential_decay",
    "join_schedules",
    "linear_schedule",
    "one_cycle",
    "piecewise_constant_schedule",
    "polynomial_schedule",
    "warmup_cosine",
]
