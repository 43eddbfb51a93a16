"""Labelled data → few-shot tasks."""

from torchopt_dist.data.task_sampler import Task, TaskSampler

__all__ = ["Task", "TaskSampler"]


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
