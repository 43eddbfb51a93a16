"""Labelled data → few-shot tasks; and letters of many scripts as such data."""

from torchopt_dist.data.glyphs import Glyphs, GlyphSplit, glyphs
from torchopt_dist.data.task_sampler import Task, TaskSampler

__all__ = ["GlyphSplit", "Glyphs", "Task", "TaskSampler", "glyphs"]


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
