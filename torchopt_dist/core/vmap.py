"""A tensor inside ``vmap`` → the values that it has for all samples, which have a graph; and the way back.

Inside ``vmap`` a tensor stands for the values of all samples, and only these have a graph. Where each sample has
parameters of its own, the gradients of the sum of all losses are those of the samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from torchopt_dist.formulas.attention import without_fast_path
from torchopt_dist.torch_private import (
    batch_of,
    batched,
    is_functorch_tensor,
    outside_of_transforms,
    transform_level,
    transforms_are_active,
    vmap_randomness,
    vmaps,
)

__all__ = [
    "Samples",
    "Values",
    "detach_",
    "detached",
    "differentiable",
    "for_each_sample",
    "has_history",
    "leaf",
    "same_values",
    "samples_around",
    "values_of",
    "visible",
]

T = TypeVar("T")
_HERE = nullcontext()


class Values(NamedTuple):
    """What a tensor is for all samples of every ``vmap`` that is active; outside of them the tensor itself."""

    values: Tensor
    """With a dimension more for each ``vmap`` whose samples differ."""
    dims: tuple[int | None, ...] = ()
    """For each ``vmap``, the outermost first, the dimension that counts its samples; ``None`` if all have the same."""

    def tensor(self, values: Tensor | None = None) -> Tensor:
        """The tensor that has these values, or others of their shape."""
        made = self.values if values is None else values
        if not self.dims:
            return made
        for (level, _), dim in zip(vmaps(), self.dims, strict=True):
            if dim is not None:
                made = batched(made, dim, level)
        return made

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> None:
        """Register a hook that is given the gradient of each sample."""
        for dim in reversed(self.dims):
            if dim is not None:
                hook = torch.vmap(hook, in_dims=dim, out_dims=dim)
        self.values.register_hook(hook)

    def differ_where(self, other: Values) -> bool:
        """Whether samples have values of their own wherever those of ``other`` have."""
        return all(
            mine is not None or theirs is None for mine, theirs in zip(self.dims, other.dims, strict=True)
        )


def values_of(tensor: Tensor, levels: list[tuple[int, int]] | None = None) -> Values:
    """The values of a tensor; ``levels`` are those of :func:`vmaps`, if they are known already."""
    dims: list[int | None] = []
    for level, _ in reversed(vmaps() if levels is None else levels):
        found = batch_of(tensor, level)
        dims.append(None if found is None else found[1])
        tensor = tensor if found is None else found[0]
    return Values(tensor, tuple(reversed(dims)))


def for_each_sample(tensor: Tensor) -> Tensor:
    """The same tensor expanded to each sample of each ``vmap``; gradients flow back to the given one."""
    if not transforms_are_active():
        return tensor
    values, dims = values_of(tensor)
    if all(dim is not None for dim in dims):
        return tensor
    for (level, size), dim in zip(vmaps(), dims, strict=True):
        if dim is None:
            values, dim = values.unsqueeze(0).expand(size, *values.shape), 0
        values = batched(values, dim, level)
    return values


def visible(tensor: Tensor) -> Tensor | None:
    """The values of a tensor for all samples, to be read; ``None`` where another transform than ``vmap`` hides them."""
    values = values_of(tensor).values if transforms_are_active() else tensor
    return None if is_functorch_tensor(values) else values.detach()


def same_values(before: Tensor, now: Tensor) -> bool:
    """Whether a tensor is known to have the values that it had; not inside a transform, whose tensors hide theirs."""
    if transforms_are_active():
        if is_functorch_tensor(before) or is_functorch_tensor(now):
            return False
        with outside_of_transforms():
            return same_values(before, now)
    if before.shape != now.shape or before.dtype != now.dtype or before.device != now.device:
        return False
    return bool(((before == now) | (before.isnan() & now.isnan())).all())


def differentiable(tensors: Iterable[Any]) -> list[Tensor]:
    """The tensors that may have a gradient, each once; a transform hides which of its own require grad."""
    active = transforms_are_active()
    found: dict[int, Tensor] = {}
    for tensor in tensors:
        if isinstance(tensor, Tensor) and (
            tensor.requires_grad
            or (
                active and is_functorch_tensor(tensor) and (tensor.is_floating_point() or tensor.is_complex())
            )
        ):
            found[id(tensor)] = tensor
    return list(found.values())


def has_history(tensor: Tensor) -> bool:
    """Whether the values of a tensor are a result of others that require grad."""
    return values_of(tensor).values.grad_fn is not None


def leaf(tensor: Tensor) -> Tensor:
    """The values of a tensor without their history; they require grad."""
    if not transforms_are_active():
        return tensor.detach().requires_grad_()
    if transform_level() > len(vmaps()):
        return tensor  # another transformation is around, and its tensors cannot be made leaves
    return detached(tensor, requires_grad=True)


def detach_(tensor: Tensor) -> None:
    """Detach the values of a tensor from their history in place; they require grad afterwards."""
    held = values_of(tensor)
    with outside_of_transforms() if held.dims else nullcontext():
        held.values.detach_().requires_grad_()


def detached(tensor: Tensor, *, requires_grad: bool | None = None, copy: bool = False) -> Tensor:
    """A tensor on the same memory, or on its own, without history, inside ``vmap`` too.

    Args:
        tensor: the tensor.
        requires_grad: whether the values require grad; as those of the given tensor, if not given.
        copy: give it memory of its own.

    Raises:
        RuntimeError: another transformation of ``torch.func`` than ``vmap`` is active, and the values require grad.
    """
    held = values_of(tensor)
    wanted = held.values.requires_grad if requires_grad is None else requires_grad
    if transform_level() > len(held.dims):
        plain = tensor.detach()
        return (plain.clone() if copy else plain).requires_grad_(wanted)
    with outside_of_transforms() if held.dims else nullcontext():
        values = held.values.detach()
        values = (values.clone() if copy else values).requires_grad_(wanted)
    return held.tensor(values)


@dataclass(frozen=True)
class Samples:
    """The samples of every ``vmap`` around, which can be entered again when it has ended; without one a single sample.

    A tensor inside ``vmap`` consists of the values of all samples and the level of nesting. So the tensors that a
    function has closed over are valid again inside another ``vmap`` of the same level and size.
    """

    levels: tuple[tuple[int, int], ...] = ()
    """Nesting and size of each ``vmap``, the outermost first."""
    randomness: tuple[str, ...] = ()
    """``vmap``'s argument of this name."""

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
        """Called outside all transforms: call a function inside these levels, with their tensors as they were.

        Raises:
            NotImplementedError: another transformation is active.
        """
        if not self.levels:
            return function()
        made: list[T] = []
        with without_fast_path():
            self._enter(lambda: made.append(function()), 0, torch.empty(0, device="cpu"))
        return made[0]

    def _enter(self, function: Callable[[], None], depth: int, sample: Tensor) -> Tensor:
        if depth < len(self.levels):
            inside = partial(self._enter, function, depth + 1)
            torch.vmap(inside, randomness=self.randomness[depth])(
                torch.empty(self.levels[depth][1], device="cpu")
            )
        elif tuple(vmaps()) != self.levels:
            raise NotImplementedError(
                "a backward pass through an inner loop of `torch.vmap` cannot be inside another transformation: "
                "call `backward()` or `torch.autograd.grad` outside of it"
            )
        else:
            function()
        return sample

    def again(self, function: Callable[[], Sequence[Tensor]]) -> list[Tensor]:
        """As :meth:`call`, for a function that returns tensors: the values of these, as :meth:`stack` gives them."""
        return self.call(lambda: [self.stack(found) for found in function()])


def samples_around() -> Samples | None:
    """The samples of every ``vmap`` that is active; ``None`` if another transformation is, too."""
    if not transforms_are_active():
        return Samples()
    levels, randomness = vmaps(), vmap_randomness()
    if randomness is None or not levels or len(levels) < transform_level():
        return None
    return Samples(tuple(levels), tuple(randomness))
