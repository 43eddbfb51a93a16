"""The ``vmap`` that an inner loop runs in → the same tasks once more, in a backward pass, when that ``vmap`` has ended.

A tensor inside ``vmap`` consists of the values of all tasks and the level of nesting. So the tensors that a loss has
closed over are valid again inside another ``vmap`` of the same level and size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from torch import Tensor

from torchopt_dist._torch_private import outside_of_transforms, transforms_are_active, vmaps
from torchopt_dist._vmap import Values, Vmaps, for_each_sample, values_of, vmaps_to_enter_again

__all__ = ["Tasks", "current_tasks"]


_HERE = nullcontext()


@dataclass(frozen=True)
class Tasks:
    """The tasks of every ``vmap`` around a loop; without one there is a single task, which no method changes."""

    levels: tuple[tuple[int, int], ...] = ()
    """Nesting and size of each ``vmap``, the outermost first."""
    around: Vmaps | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many tasks each ``vmap`` has."""
        return tuple(size for _, size in self.levels)

    def outside(self) -> AbstractContextManager[object]:
        """A context outside every ``vmap``, where values are ordinary tensors with a history."""
        return outside_of_transforms() if self.levels else _HERE

    def values(self, tensors: Sequence[Tensor]) -> list[Values]:
        """The values of tensors for all tasks."""
        return [values_of(tensor, list(self.levels)) for tensor in tensors]

    def values_of_each(self, tensors: Sequence[Tensor]) -> list[Values]:
        """The values of tensors, with separate ones for each task."""
        return self.values([for_each_sample(tensor) for tensor in tensors] if self.levels else tensors)

    def tensors(self, held: Sequence[Values], values: Sequence[Tensor]) -> list[Tensor]:
        """The tensors that have other values, of the shapes of those that are held."""
        if not self.levels:
            return list(values)
        return [one.tensor(value) for one, value in zip(held, values, strict=True)]

    def stacked(self, values: Tensor) -> Values:
        """Of values whose first dimensions count the tasks."""
        return Values(values, (0,) * len(self.levels))

    def again(self, function: Callable[[], Sequence[Tensor]]) -> list[Tensor]:
        """Call a function for all tasks, from outside every ``vmap``.

        Args:
            function: takes its tensors from :class:`Values`; returns tensors.

        Returns:
            Their values, whose first dimensions count the tasks.

        Raises:
            NotImplementedError: another transformation is active.
        """
        if self.around is None:
            return list(function())

        def inside() -> list[Values]:
            if tuple(vmaps()) != self.levels:
                raise NotImplementedError(
                    "a backward pass through an inner loop of `torch.vmap` cannot be inside another transformation: "
                    "call `backward()` or `torch.autograd.grad` outside of it"
                )
            return self.values_of_each(function())

        return [_tasks_first(found) for found in self.around.call(inside)]


def _tasks_first(held: Values) -> Tensor:
    values = held.values
    for depth, dim in enumerate(held.dims):
        assert dim is not None
        values = values.movedim(depth + dim, depth)  # it is counted among those that the next `vmap` sees
    return values


def current_tasks(adjoint: object) -> Tasks:
    """The tasks of every ``vmap`` that is active.

    Raises:
        NotImplementedError: another transformation is active, too.
    """
    if not transforms_are_active():
        return Tasks()
    around = vmaps_to_enter_again()
    if around is None:
        raise NotImplementedError(
            f"`{type(adjoint).__name__}` does not run inside `torch.func.grad` or another transformation than "
            "`torch.vmap`: call `backward()` or `torch.autograd.grad` outside of `vmap`, or take `Recorded()` or "
            "`Truncated(1)` there"
        )
    return Tasks(tuple(vmaps()), around)
