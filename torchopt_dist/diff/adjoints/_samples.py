"""The ``vmap`` that a loop runs in → its samples once more, from outside or in a backward pass, when it has ended.

A tensor inside ``vmap`` consists of the values of all samples and the level of nesting. So the tensors that a loss has
closed over are valid again inside another ``vmap`` of the same level and size, and only the values have a graph. An
estimate calls its loop in such a ``vmap`` once more; a block of a model is called again so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from torchopt_dist.core.vmap import Values, Vmaps, for_each_sample, values_of, vmaps_to_enter_again
from torchopt_dist.torch_private import outside_of_transforms, transforms_are_active, vmaps

__all__ = ["Samples", "samples_around", "samples_for"]

T = TypeVar("T")
_HERE = nullcontext()


@dataclass(frozen=True)
class Samples:
    """The samples of every ``vmap`` around a loop; without one there is a single one, which no method changes."""

    levels: tuple[tuple[int, int], ...] = ()
    """Nesting and size of each ``vmap``, the outermost first."""
    vmaps: Vmaps | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many samples each ``vmap`` has."""
        return tuple(size for _, size in self.levels)

    def outside(self) -> AbstractContextManager[object]:
        """A context outside every ``vmap``, where values are ordinary tensors with a history."""
        return outside_of_transforms() if self.levels else _HERE

    def values(self, tensors: Sequence[Tensor]) -> list[Values]:
        """The values of tensors for all samples."""
        return [values_of(tensor, list(self.levels)) for tensor in tensors]

    def values_of_each(self, tensors: Sequence[Tensor]) -> list[Values]:
        """The values of tensors, with separate ones for each sample."""
        return self.values([for_each_sample(tensor) for tensor in tensors] if self.levels else tensors)

    def tensors(self, held: Sequence[Values], values: Sequence[Tensor]) -> list[Tensor]:
        """The tensors that have other values, of the shapes of those that are held."""
        if not self.levels:
            return list(values)
        return [one.tensor(value) for one, value in zip(held, values, strict=True)]

    def stacked(self, values: Tensor) -> Values:
        """Of values whose first dimensions count the samples."""
        return Values(values, (0,) * len(self.levels))

    def entry(self, values: Tensor) -> Tensor:
        """Inside: the tensor that has the values whose first dimensions count the samples."""
        return self.stacked(values).tensor()

    def stack(self, tensor: Tensor) -> Tensor:
        """Inside: the values of a tensor, whose first dimensions count the samples."""
        (held,) = self.values_of_each([tensor])
        values = held.values
        # A dimension is counted among those of the tensor that the next ``vmap`` further out sees.
        for depth, dim in enumerate(held.dims):
            assert dim is not None
            values = values.movedim(depth + dim, depth)
        return values

    def call(self, function: Callable[[], T]) -> T:
        """Call a function for all samples, from outside every ``vmap``.

        Raises:
            NotImplementedError: another transformation is active.
        """
        if self.vmaps is None:
            return function()

        def inside() -> T:
            if tuple(vmaps()) != self.levels:
                raise NotImplementedError(
                    "a backward pass through an inner loop of `torch.vmap` cannot be inside another transformation: "
                    "call `backward()` or `torch.autograd.grad` outside of it"
                )
            return function()

        return self.vmaps.call(inside)

    def again(self, function: Callable[[], Sequence[Tensor]]) -> list[Tensor]:
        """As :meth:`call`, for a function that returns tensors: the values of these, as :meth:`stack` gives them."""
        return self.call(lambda: [self.stack(found) for found in function()])


def samples_around() -> Samples | None:
    """The samples of every ``vmap`` that is active; ``None`` if another transformation is, too."""
    if not transforms_are_active():
        return Samples()
    around = vmaps_to_enter_again()
    return None if around is None else Samples(tuple(vmaps()), around)


def samples_for(adjoint: object) -> Samples:
    """As :func:`samples_around`, for an adjoint that runs in no other transformation.

    Raises:
        NotImplementedError: another transformation is active.
    """
    around = samples_around()
    if around is None:
        raise NotImplementedError(
            f"`{type(adjoint).__name__}` does not run inside `torch.func.grad` or another transformation than "
            "`torch.vmap`: call `backward()` or `torch.autograd.grad` outside of `vmap`, or take `Recorded()` or "
            "`Truncated(1)` there"
        )
    return around
