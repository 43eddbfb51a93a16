"""``write = scalar_writer(folder)`` → scalars of a training run, by step, in files that TensorBoard reads."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from torch import Tensor

from torchopt_dist.distributed.world import get_rank

if TYPE_CHECKING:
    from typing import Self

__all__ = ["WriteScalars", "scalar_writer"]

WriteScalars: TypeAlias = Callable[[int, Mapping[str, float | Tensor]], None]
"""What :func:`scalar_writer` gives: called with a step and numbers by name."""


class scalar_writer:  # noqa: N801 - what users call, in a `with` statement or as a function
    """Write scalars for TensorBoard on rank 0; on other ranks, and without a folder, writing does nothing.

    So a program can use it without a condition, and pass ``None`` if no folder was asked for. In a ``with`` statement
    all scalars are in the files when the statement is left; without one they are after ``close()``, or when the
    program ends.

    Args:
        folder: the folder that TensorBoard reads; it is made if it does not exist. A program that continues from a
            checkpoint adds its files to those that are there.

    Returns:
        A function of a step and of numbers by name, each a float or a tensor of one element; a name such as
        ``"train/loss"`` puts the curve in a group.

    Raises:
        ImportError: the package ``tensorboard`` is not installed.

    Example:
        >>> import torch
        >>> import torchopt_dist as todist
        >>> with todist.scalar_writer(None) as write:  # or a folder, as of ``--tensorboard runs/1``
        ...     for step in range(3):
        ...         write(step, {"loss": torch.tensor(1.0) / (1 + step)})
    """

    def __init__(self, folder: str | os.PathLike[str] | None) -> None:
        self._writer: Any = None
        if folder is None or get_rank() != 0:
            return
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                f"writing for TensorBoard needs the package tensorboard, which cannot be imported ({error}): "
                "pip install 'torchopt_dist[tensorboard]'; or give no folder"
            ) from error
        writer: Any = SummaryWriter(os.fspath(folder))
        self._writer, self._close = writer, weakref.finalize(self, writer.close)

    def __call__(self, step: int, numbers: Mapping[str, float | Tensor]) -> None:
        """Write numbers of a step.

        Args:
            step: the step.
            numbers: the numbers by name.

        Raises:
            TypeError: ``numbers`` is no dictionary, or has something else than numbers.
            ValueError: the writer is closed, or a tensor has more than one element.
        """
        if not isinstance(numbers, Mapping):
            raise TypeError(
                f"numbers must be a dictionary from names to numbers, got {type(numbers).__name__} {numbers!r:.80}: "
                'write `write(step, {"loss": loss})`'
            )
        for name, number in numbers.items():
            if not isinstance(number, (int, float, Tensor, np.number)):
                raise TypeError(
                    f"numbers[{name!r}] must be a number, got {type(number).__name__} {number!r:.80}"
                )
            if isinstance(number, Tensor) and number.numel() != 1:
                raise ValueError(
                    f"numbers[{name!r}] must be one number, got a tensor of shape {tuple(number.shape)}"
                )
        if self._writer is None:
            return
        if not self._close.alive:
            raise ValueError(
                "`scalar_writer` is closed: write inside its `with` statement, or before `close`"
            )
        for name, number in numbers.items():
            value = number.item() if isinstance(number, Tensor) else float(number)
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write all that is pending; nothing can be written afterwards."""
        if self._writer is not None:
            self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
