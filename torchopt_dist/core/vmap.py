"""A tensor inside ``vmap`` → the values that it has for all samples, which have a graph; and the way back.

Inside ``vmap`` a tensor stands for the values of all samples, and only these have a graph. Where each sample has
parameters of its own, the gradients of the sum of all losses are those of the samples.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from torchopt_dist.formulas.attention import without_fast_path
from torchopt_dist.torch_private import (
    batch_of,
    batched,
    outside_of_transforms,
    transform_level,
    vmap_randomness,
    vmaps,
)

__all__ = [
    "Values",
    "Vmaps",
    "detach_",
    "detached",
    "for_each_sample",
    "has_history",
    "leaf",
    "values_of",
    "vmaps_to_enter_again",
]

T = TypeVar("T")


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
    values, dims = values_of(tensor)
    if all(dim is not None for dim in dims):
        return tensor
    for (level, size), dim in zip(vmaps(), dims, strict=True):
        if dim is None:
            values, dim = values.unsqueeze(0).expand(size, *values.shape), 0
        values = batched(values, dim, level)
    return values


def has_history(tensor: Tensor) -> bool:
    """Whether the values of a tensor are a result of others that require grad."""
    return values_of(tensor).values.grad_fn is not None


def leaf(tensor: Tensor) -> Tensor:
    """The values of a tensor without their history; they require grad."""
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


class Vmaps(NamedTuple):
    """The ``vmap`` levels that were active, the outermost first, which can be entered again after they have ended."""

    sizes: tuple[int, ...]
    """How many samples each has."""
    randomness: tuple[str, ...]
    """``vmap``'s argument of this name."""

    def call(self, function: Callable[[], T]) -> T:
        """Called outside all transforms: call a function inside these levels, with their tensors as they were."""
        made: list[T] = []
        with without_fast_path():
            self._enter(lambda: made.append(function()), 0, torch.empty(0, device="cpu"))
        return made[0]

    def _enter(self, function: Callable[[], None], depth: int, sample: Tensor) -> Tensor:
        if depth == len(self.sizes):
            function()
        else:
            inside = partial(self._enter, function, depth + 1)
            torch.vmap(inside, randomness=self.randomness[depth])(
                torch.empty(self.sizes[depth], device="cpu")
            )
        return sample


def vmaps_to_enter_again() -> Vmaps | None:
    """The active ``vmap`` levels; ``None`` if there is none, or if another transformation is active."""
    levels, randomness = vmaps(), vmap_randomness()
    if randomness is None or not levels or len(levels) < transform_level():
        return None
    return Vmaps(tuple(size for _, size in levels), tuple(randomness))
