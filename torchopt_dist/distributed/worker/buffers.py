"""A function that changes buffers of its modules → the same, which returns these, too; → the caller's buffers, set.

A task works on copies, so the running statistics of a ``BatchNorm`` change there. Each task starts from the caller's
buffers, so what comes back does not depend on the number of workers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, Self, TypeAlias

import torch
from torch import Tensor, nn

from torchopt_dist.core.vmap import for_each_sample, same_values
from torchopt_dist.pytree._containers import flatten
from torchopt_dist.torch_private import buffers_of

__all__ = ["Buffers", "Place", "Returning", "buffers_in", "check_buffers", "take"]

Buffers: TypeAlias = Literal["mean", "first"] | None
"""What becomes of buffers that tasks have changed."""
_Key: TypeAlias = tuple[str, str]
"""The path of a module among the arguments, and the name of a buffer in it."""


def check_buffers(buffers: Any) -> None:
    """Raise :class:`ValueError` unless the argument of this name is one that there is."""
    if buffers not in ("mean", "first", None):
        raise ValueError(f'buffers must be "mean", "first" or None, got {buffers!r}')


class Place(NamedTuple):
    """Where a buffer is."""

    key: _Key
    owner: nn.Module
    name: str
    tensor: Tensor


def buffers_in(function: Any, args: Any, kwargs: Any) -> Iterator[Place]:
    """The buffers of the modules among the arguments, and of the function, if it is a module or a method of one."""
    while isinstance(function, partial):
        args, kwargs = (*function.args, *args), {**function.keywords, **kwargs}
        function = function.func
    leaves, paths, _ = flatten((tuple(args), kwargs), is_leaf=lambda leaf: isinstance(leaf, nn.Module))
    modules = [("", getattr(function, "__self__", function)), *zip(paths(""), leaves, strict=True)]
    for path, module in modules:
        if isinstance(module, nn.Module):
            for inside, owner in module.named_modules():
                for name, tensor in buffers_of(owner).items():
                    if tensor is not None:
                        yield Place((path, f"{inside}.{name}".lstrip(".")), owner, name, tensor)


class Returning(partial):  # type: ignore[type-arg]
    """A function → ``(its value, the buffers that it has changed)``; the modules get their buffers back.

    As a ``partial`` it is what it calls to all that looks for a function's code and for its global variables.
    """

    def __new__(cls, func: Callable[..., Any]) -> Self:
        """Keep the function's name, for messages."""
        self = super().__new__(cls, func)
        for name in ("__name__", "__qualname__"):
            if hasattr(func, name):
                setattr(self, name, getattr(func, name))
        return self

    def __call__(self, /, *args: Any, **kwargs: Any) -> tuple[Any, dict[_Key, Tensor]]:
        """Call the function on buffers of the call's own."""
        places = list(buffers_in(self, args, kwargs))
        own = {id(place.tensor): place.tensor for place in places}
        own = {key: for_each_sample(tensor.detach()).clone() for key, tensor in own.items()}
        for place in places:
            buffers_of(place.owner)[place.name] = own[id(place.tensor)]
        try:
            value = super().__call__(*args, **kwargs)
            found = [(place, buffers_of(place.owner).get(place.name)) for place in places]
        finally:
            for place in places:
                buffers_of(place.owner)[place.name] = place.tensor
        changed = {
            place.key: now.detach()
            for place, now in found
            if now is not None and not same_values(place.tensor, now)
        }
        return value, changed


def take(
    function: Any, partitions: Sequence[Any], results: Sequence[Any], buffers: Literal["mean", "first"]
) -> list[Any]:
    """Set the caller's buffers to what tasks have made of them; returns the function's values.

    A mean over the tasks is weighted by their sizes, and of integers it is the largest, element by element; ``"first"``
    are those of the first task that was given the module. ``results`` are what :class:`Returning` has returned.

    Raises :class:`ValueError` if a mean is wanted, and the tasks have made a buffer of different shapes; warns if no
    running statistic has changed.
    """
    found: dict[int, tuple[Place, list[Tensor], list[float]]] = {}
    changed: set[int] = set()
    for part, (_, made) in zip(partitions, results, strict=True):
        _, args, kwargs = part
        seen: set[int] = set()
        for place in buffers_in(function, args, kwargs):
            key = id(place.tensor)
            if key not in seen:
                seen.add(key)
                _, values, sizes = found.setdefault(key, (place, [], []))
                values.append(made.get(place.key, place.tensor).to(place.tensor.device))
                sizes.append(float(getattr(part, "size", 1)))
                if place.key in made:
                    changed.add(key)
    if not changed and any(
        place.owner.training and place.name == "running_mean" for place, *_ in found.values()
    ):
        warnings.warn(
            f"buffers={buffers!r} has found none that the tasks have changed, so running statistics stay as they are: "
            "the module that `inner_loop` returns has buffers of its own, which a task copies by "
            "`for own, new in zip(module.buffers(), adapted.buffers()): own.copy_(new)`",
            stacklevel=2,
        )
    for key in changed:
        place, values, sizes = found[key]
        value = values[0] if buffers == "first" else _mean(place, values, sizes)
        with torch.no_grad():
            if value.shape == place.tensor.shape and value.dtype == place.tensor.dtype:
                place.tensor.copy_(value)
            else:
                buffers_of(place.owner)[place.name] = value
    return [value for value, _ in results]


def _mean(place: Place, values: list[Tensor], sizes: list[float]) -> Tensor:
    if len({value.shape for value in values}) > 1:
        shapes = sorted({tuple(value.shape) for value in values})
        raise ValueError(
            f'buffers="mean" needs a buffer of one shape, and tasks have made `{place.key[1]}` of shapes {shapes}: '
            'write buffers="first"'
        )
    stacked = torch.stack(values)
    if not (stacked.is_floating_point() or stacked.is_complex()):
        return stacked.amax(0)
    wide = stacked.to(torch.complex128 if stacked.is_complex() else torch.float64)
    weights = torch.tensor(sizes, dtype=wide.dtype, device=wide.device) / (sum(sizes) or 1.0)
    return torch.tensordot(weights, wide, 1).to(stacked.dtype)
