"""``with scalar_writer(folder) as write`` → scalars of a training run, by step, in files that TensorBoard reads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeAlias

from torch import Tensor

from torchopt_dist.distributed.world import get_rank

__all__ = ["WriteScalars", "scalar_writer"]

WriteScalars: TypeAlias = Callable[[int, Mapping[str, float | Tensor]], None]
"""What :func:`scalar_writer` gives: called with a step and numbers by name."""


@contextmanager
def scalar_writer(folder: str | os.PathLike[str] | None) -> Iterator[WriteScalars]:
    """Write scalars for TensorBoard on rank 0; on other ranks, and without a folder, writing does nothing.

    So a program can use it without a condition, and pass ``None`` if no folder was asked for.

    Args:
        folder: the folder that TensorBoard reads; it is made if it does not exist. A program that continues from a
            checkpoint adds its files to those that are there.

    Yields:
        A function of a step and of numbers by name, each a float or a tensor of one element; a name such as
        ``"train/loss"`` puts the curve in a group. All scalars are in the files when the context is left.

    Raises:
        ImportError: the package ``tensorboard`` is not installed.

    Example:
        >>> import torch
        >>> import torchopt_dist as todist
        >>> with todist.scalar_writer(None) as write:  # or a folder, as of ``--tensorboard runs/1``
        ...     for step in range(3):
        ...         write(step, {"loss": torch.tensor(1.0) / (1 + step)})
    """
    if folder is None or get_rank() != 0:
        yield _nothing
        return
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(
            f"writing for TensorBoard needs the package tensorboard, which cannot be imported ({error}): "
            "pip install 'torchopt_dist[tensorboard]'; or give no folder"
        ) from error
    with SummaryWriter(os.fspath(folder)) as writer:

        def write(step: int, numbers: Mapping[str, float | Tensor]) -> None:
            for name, number in numbers.items():
                writer.add_scalar(name, number.item() if isinstance(number, Tensor) else float(number), step)

        yield write


def _nothing(step: int, numbers: Mapping[str, float | Tensor]) -> None:
    pass
