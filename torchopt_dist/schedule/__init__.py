"""Step count → value: schedules, and the way from them to ``torch.optim.lr_scheduler``."""

from torchopt_dist.schedule.cosine import cosine_decay, warmup_cosine
from torchopt_dist.schedule.exponential import exponential_decay
from torchopt_dist.schedule.join import join_schedules
from torchopt_dist.schedule.lr_scheduler import ScheduleLR
from torchopt_dist.schedule.one_cycle import one_cycle
from torchopt_dist.schedule.piecewise_constant import piecewise_constant_schedule
from torchopt_dist.schedule.polynomial import linear_schedule, polynomial_schedule

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
