"""A process group whose ranks run one loop → means over them, and what takes gradients to and from each of them.

A *replicated* tensor is the same on all ranks; a *local* one is each rank's own. With ``L = mean_r L_r`` the loss of
all ranks, and gradients of replicated tensors replicated as well, two functions are each other's transposes: replicated
→ local keeps the values, and its gradient is the mean; local → replicated is the mean, and its gradient passes
unchanged. JAX calls them ``pvary`` and ``pmean`` (JEP 17111). Both have derivatives of every order, in both modes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchopt_dist.core.types import OptionalTensor
from torchopt_dist.diff.adjoints._rank_group import RankGroup

__all__ = ["Ranks", "kinds", "local", "mean", "owned"]


@dataclass
class Ranks:
    """The ranks that run one loop."""

    group: RankGroup
    own: frozenset[int] = frozenset()
    """Places among the declared tensors of those that are this rank's own."""
    moved: Sequence[Tensor] = ()
    """The first moved parameters."""
    sums: bool = False
    """Whether sums take the places of means."""
    shards: bool = False
    """Whether the moved parameters are parts, whose gradients are means as they come."""
    asks_again: bool = False
    """Whether each backward pass asks anew which of the tensors have a gradient."""
    used: list[bool] | None = field(default=None, init=False)
    """Whether a moved parameter gets a gradient on any rank; the first gradient says so."""

    @property
    def rank(self) -> int:
        """The number of this rank among them."""
        return self.group.rank

    @property
    def size(self) -> int:
        """How many there are."""
        return self.group.size

    def mean_of_step(
        self, grads: Sequence[OptionalTensor], loss: Tensor
    ) -> tuple[list[OptionalTensor], Tensor]:
        """The mean gradients of the moved parameters, and that of the loss, in one message.

        A gradient that other ranks have is taken for zero here.

        Raises:
            ValueError: a parameter has a gradient that it had on no rank in the first step.
        """
        if self.shards:
            return list(grads), self.reduced([loss])[0]
        filled = self.filled(grads)
        *means, total = self.reduced([*(grad for grad in filled if grad is not None), loss])
        return self._at(
            filled, means
        ), total.clone()  # which is kept, and must not keep the gradients' memory

    def filled(self, grads: Sequence[OptionalTensor], shapes: Sequence[Any] = ()) -> list[OptionalTensor]:
        """Gradients of the moved parameters, with zeros for those that only other ranks have.

        Args:
            grads: the gradients.
            shapes: of the zeros; as in the first step, if not given.
        """
        if self.used is None:
            of_each = self.group.agreed([None if grad is None else tuple(grad.shape) for grad in grads])
            found = [{shape for shape in ones if shape is not None} for ones in zip(*of_each, strict=True)]
            if wrong := [place for place, these in enumerate(found) if len(these) > 1]:
                raise ValueError(
                    f"all ranks must run the same loop with `parallel`: the gradients of parameter {wrong[0]} of those "
                    f"that are moved have the shapes {sorted(found[wrong[0]])}"
                )
            self._shapes = [next(iter(these), None) for these in found]
            self.used = [shape is not None for shape in self._shapes]
        late = [
            place
            for place, (grad, used) in enumerate(zip(grads, self.used, strict=True))
            if grad is not None and not used
        ]
        if late:
            raise ValueError(
                "`loss` must use the same parameters in every step with `parallel`: parameter "
                f"{late[0]} of those that are moved had no gradient on any rank in the first step, and has one now"
            )
        sizes: Sequence[Any] = shapes or self._shapes

        def zeros(place: int) -> Tensor:
            like = self.moved[place]
            return torch.zeros(sizes[place], dtype=like.dtype, device=like.device)

        return [
            zeros(place) if grad is None and used else grad
            for place, (grad, used) in enumerate(zip(grads, self.used, strict=True))
        ]

    def reduced(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The mean of each tensor over the ranks, by one message a dtype and device; nothing is recorded."""
        found: list[Tensor] = list(tensors)
        for places in kinds(tensors):
            flat = torch.cat([tensors[place].detach().reshape(-1) for place in places])
            self.group.all_reduce(torch.view_as_real(flat) if flat.is_complex() else flat)
            if not self.sums:
                flat /= self.size
            parts = flat.split([tensors[place].numel() for place in places])
            for place, part in zip(places, parts, strict=True):
                found[place] = part.view(tensors[place].shape)
        return found

    def part(self, tensors: Sequence[Tensor]) -> Tensor:
        """This rank's part of tensors, laid end to end, in memory of its own; all parts have the same size."""
        size = -(-sum(tensor.numel() for tensor in tensors) // self.size)
        begin, own = -self.rank * size, []
        for tensor in tensors:
            first = min(max(-begin, 0), tensor.numel())
            # None of a tensor is a part of it, too, which has its history.
            own.append(tensor.reshape(-1)[first : max(first, size - begin)])
            begin += tensor.numel()
        rest = size - sum(map(len, own))
        return torch.cat([*own, tensors[0].new_zeros(rest)] if rest else own)

    def whole(self, part: Tensor, size: int) -> Tensor:
        """The vector of this size of which each rank has a part."""
        flat = part.new_empty(len(part) * self.size)
        self.group.all_gather(list(flat.split(len(part))), part)
        return flat[:size]

    def _at(self, filled: Sequence[OptionalTensor], means: Sequence[Tensor]) -> list[OptionalTensor]:
        rest = iter(means)
        return [None if grad is None else next(rest) for grad in filled]


def kinds(tensors: Sequence[Tensor]) -> list[list[int]]:
    """The places of the tensors of each dtype and device."""
    found: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for place, tensor in enumerate(tensors):
        found.setdefault((tensor.dtype, tensor.device), []).append(place)
    return list(found.values())


def local(ranks: Ranks, tensors: Sequence[Tensor], *, are_params: bool = False) -> list[Tensor]:
    """Replicated → local: the same values, whose gradients are averaged.

    Args:
        ranks: the ranks.
        tensors: the tensors.
        are_params: whether they are the moved parameters, which may not all have a gradient.
    """
    return list(_Local.apply(ranks, are_params, *tensors)) if tensors else []


def mean(ranks: Ranks, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Local → replicated: the mean over the ranks."""
    return list(_Mean.apply(ranks, *tensors)) if tensors else []


def owned(ranks: Ranks, tensors: Sequence[Tensor]) -> list[Tensor]:
    """A rank's own tensors: the same values, whose gradient is that of the mean over the ranks."""
    return list(_Own.apply(ranks, *tensors)) if tensors else []


class _Local(torch.autograd.Function):
    apply: ClassVar[Any]

    @staticmethod
    def forward(ranks: Ranks, are_params: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.ranks, ctx.are_params, *tensors = inputs
        ctx.set_materialize_grads(not ctx.are_params)
        ctx.shapes = [tensor.shape for tensor in tensors]

    @staticmethod
    def backward(ctx: Any, *bars: OptionalTensor) -> tuple[Any, ...]:
        if all(bar is None for bar in bars):
            return None, None, *bars
        ctx.ranks.group.in_backward()
        ranks = replace(ctx.ranks) if ctx.ranks.asks_again else ctx.ranks
        filled = ranks.filled(bars, ctx.shapes) if ctx.are_params else bars
        found = iter(_Mean.apply(ranks, *(bar for bar in filled if bar is not None)))
        return None, None, *(None if bar is None else next(found) for bar in filled)

    @staticmethod
    def jvp(ctx: Any, ranks: None, are_params: None, *tangents: OptionalTensor) -> tuple[OptionalTensor, ...]:
        return tuple(None if tangent is None else tangent.view_as(tangent) for tangent in tangents)

    @staticmethod
    def vmap(info: Any, dims: Any, ranks: Ranks, are_params: bool, *tensors: Tensor) -> Any:
        return _Local.apply(ranks, are_params, *tensors), dims[2:]


class _Mean(torch.autograd.Function):
    apply: ClassVar[Any]

    @staticmethod
    def forward(ranks: Ranks, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(ranks.reduced(tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.ranks = inputs[0]

    @staticmethod
    def backward(ctx: Any, *bars: Tensor) -> tuple[Any, ...]:
        ctx.ranks.group.in_backward()
        return None, *_Local.apply(ctx.ranks, False, *bars)  # whose own gradient is a mean, not the identity

    @staticmethod
    def jvp(ctx: Any, ranks: None, *tangents: Tensor) -> tuple[Tensor, ...]:
        return tuple(_Mean.apply(ctx.ranks, *tangents))

    @staticmethod
    def vmap(info: Any, dims: Any, ranks: Ranks, *tensors: Tensor) -> Any:
        return _Mean.apply(ranks, *tensors), dims[1:]


class _Own(torch.autograd.Function):
    apply: ClassVar[Any]

    @staticmethod
    def forward(ranks: Ranks, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.ranks = inputs[0]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *bars: OptionalTensor) -> tuple[Any, ...]:
        return None, *(None if bar is None else bar / ctx.ranks.group.parts for bar in bars)

    @staticmethod
    def jvp(ctx: Any, ranks: None, *tangents: OptionalTensor) -> tuple[OptionalTensor, ...]:
        return tuple(None if tangent is None else tangent.view_as(tangent) for tangent in tangents)

    @staticmethod
    def vmap(info: Any, dims: Any, ranks: Ranks, *tensors: Tensor) -> Any:
        return _Own.apply(ranks, *tensors), dims[1:]
