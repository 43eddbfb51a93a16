"""The values of a team's members → the first one's, whose gradient goes to all members, if all have the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchopt_dist.pytree._containers import flatten

__all__ = ["one_value"]


def one_value(values: Sequence[Any], ranks: Sequence[int]) -> Any:
    """The first member's value, whose gradient goes to all members.

    Raises :class:`ValueError` if members have other values, and :class:`TypeError` if a value is a module.
    """
    flat = [flatten(value, is_leaf=_is_whole) for value in values]
    paths = flat[0].paths("value")
    for rank, other in zip(ranks, flat, strict=True):
        if other.paths("value") != paths:
            raise _others("a tree of other leaves", rank, ranks)
    leaves = []
    for path, *members in zip(paths, *(each.leaves for each in flat), strict=True):
        if isinstance(members[0], nn.Module):
            raise TypeError(
                f"a function that a team runs must return tensors, numbers or trees of these, got "
                f"{type(members[0]).__name__} in {path}: return todist.extract_state_dict(...) of it"
            )
        for rank, member in zip(ranks, members, strict=True):
            if not _agree(members[0], member):
                raise _others(f"another value in {path}", rank, ranks)
        connected = any(isinstance(member, Tensor) and member.requires_grad for member in members)
        one_of_all: Callable[..., Tensor] = _OneOfAll.apply
        leaves.append(one_of_all(*members) if connected else members[0])
    return flat[0].rebuild(iter(leaves))


def _others(what: str, rank: int, ranks: Sequence[int]) -> ValueError:
    return ValueError(
        f"all members of a team must return the same value, got {what} on rank {rank} than on rank {ranks[0]}: return "
        "todist.mean_over(value, todist.team()), the mean of the members' values"
    )


def _is_whole(leaf: Any) -> bool:
    return isinstance(leaf, (nn.Module, Tensor))


def _agree(first: Any, other: Any) -> bool:
    """Whether two members have one value; tensors may differ as those that two processors compute."""
    if not isinstance(first, Tensor) or not isinstance(other, Tensor):
        if isinstance(first, float) and isinstance(other, float):
            return _agree(torch.tensor(first, dtype=torch.float64), torch.tensor(other, dtype=torch.float64))
        try:
            return type(first) is type(other) and (first is other or bool(first == other))
        except (ValueError, RuntimeError):  # arrays have no one truth value
            return repr(first) == repr(other)
    first, other = first.detach(), other.detach().to(first.device)
    if (first.shape, first.dtype) != (other.shape, other.dtype):
        return False
    if not (first.is_floating_point() or first.is_complex()):
        return torch.equal(first, other)
    rtol = float(torch.finfo(first.dtype).eps) ** 0.575  # 1e-9 in double, 1e-4 in single precision
    finite = first[first.isfinite()]
    size = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(first, other, rtol=rtol, atol=rtol * size, equal_nan=True)


class _OneOfAll(torch.autograd.Function):
    """The members' values, which are the same → the first one; each gets its part of the gradient."""

    @staticmethod
    def forward(ctx: Any, *values: Tensor) -> Tensor:
        ctx.devices = [value.device for value in values]
        return values[0].view_as(values[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        part = grad / len(ctx.devices)
        return tuple(part.to(device) for device in ctx.devices)
