"""A model, ranks → the same model for a loop in which each rank has a part of each parameter; the loss gets them whole.

So the optimizer's state, the history and the gradients that a backward pass keeps lie in parts, too, as in ZeRO
[Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054]: a step gathers the parameters and scatters the mean
gradients, which together are as many bytes as one all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchopt_dist import pytree
from torchopt_dist.diff.adjoints._model import Model
from torchopt_dist.diff.adjoints._ranks import Ranks, kinds, local
from torchopt_dist.transform.base import GradientTransformation
from torchopt_dist.typing import OptionalTensor

__all__ = ["ShardedModel", "check_elementwise"]

SIZES = (1.0, 1e-3, 1e3, 1e9)
"""Of the gradients by which an optimizer is looked at."""


class ShardedModel(Model):
    """A model whose moved parameters are this rank's parts, vectors of the same length on all ranks.

    Args:
        whole: the model; its parameters keep their history.
        ranks: those that have the parts.
    """

    def __init__(self, whole: Model, ranks: Ranks) -> None:
        self.whole, self._ranks = whole, ranks
        self.first_places, self.moved_places = whole.first_places, whole.moved_places
        self._spec, self.buffers = whole._spec, whole.buffers
        moved = [whole.leaves[place] for place in self.moved_places]
        self._shapes = [tensor.shape for tensor in moved]
        with (
            torch.enable_grad()
        ):  # the gradient of a part is zero elsewhere, and all ranks' sum is that of the whole
            same = local(Ranks(ranks.group, sums=True), moved)
            parts = [ranks.part(tensor.reshape(-1)) for tensor in same]
        self.leaves = self._with(whole.leaves, parts)

    def gathered(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """Parts → whole parameters, whose gradients come back as the parts of their means."""
        moved = [leaves[place] for place in self.moved_places]
        return self._with(leaves, _Gather.apply(self._ranks, self._shapes, True, *moved))

    def filled(self, leaves: Sequence[Tensor], buffers: Sequence[Tensor]) -> Any:
        return self.whole.filled(self.gathered(leaves), buffers)

    def leave(self) -> None:
        self.whole.leave()

    def let_go(self) -> None:
        self.whole.let_go()

    def buffers_now(self) -> list[Tensor]:
        return self.whole.buffers_now()

    def result(self, leaves: Sequence[Tensor], buffers: Sequence[Tensor], *, last: bool = False) -> Any:
        gathered = self.gathered(leaves)
        for place in self.moved_places:
            if not gathered[place].requires_grad and leaves[place].requires_grad:
                gathered[place].requires_grad_()
        return self.whole.result([gathered[place] for place in self.first_places], buffers, last=last)

    def _with(self, leaves: Sequence[Tensor], moved: Sequence[Tensor]) -> list[Tensor]:
        made = list(leaves)
        for place, tensor in zip(self.moved_places, moved, strict=True):
            made[place] = tensor
        return [made[place] for place in self.first_places]


def check_elementwise(optimizer: GradientTransformation, model: Model) -> None:
    """Look whether an optimizer moves each element by itself, by steps on small tensors of the model's structure.

    Raises:
        ValueError: it moves the first half of the tensors in another way where the second half is missing.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(leaf: Tensor) -> Tensor:
        return torch.randn([2] * leaf.ndim, dtype=torch.float64, generator=generator)

    def half(tensor: Tensor) -> Tensor:
        return tensor.reshape(-1)[: max(1, tensor.numel() // 2)].clone()

    whole = [draw(leaf) for leaf in model.leaves]
    parts = [half(leaf) for leaf in whole]
    with torch.no_grad():
        states = [optimizer.init(model.tree(leaves)) for leaves in (whole, parts)]
        for size in SIZES:
            grads = [draw(leaf) * size for leaf in model.leaves]
            moved = []
            for number, (leaves, of_these) in enumerate(((whole, grads), (parts, [half(g) for g in grads]))):
                updates, states[number] = optimizer.update(
                    model.tree(of_these), states[number], params=model.tree(leaves), inplace=False
                )
                moved.append([leaf for leaf in pytree.flatten(updates)[0] if isinstance(leaf, Tensor)])
            for one, other in zip(*moved, strict=True):
                if not torch.allclose(half(one), other.reshape(-1), rtol=1e-6, atol=0, equal_nan=True):
                    raise ValueError(
                        "`shard` of DataParallel must be None with an optimizer that combines the elements of "
                        "parameters, as clipping by a norm, LAMB and Muon do: each rank would have a part of them"
                    )


def _rows(ranks: Ranks, tensors: Sequence[Tensor]) -> Tensor:
    """Tensors, laid out so that each rank's parts are one row."""
    rows = []
    for tensor in tensors:
        size = -(-tensor.numel() // ranks.size)
        flat = tensor.detach().reshape(-1)
        rows.append(torch.cat([flat, flat.new_zeros(size * ranks.size - len(flat))]).view(ranks.size, size))
    return torch.cat(rows, 1)


def _by_kind(
    tensors: Sequence[Tensor], function: Callable[[Sequence[Tensor], list[int]], Sequence[Tensor]]
) -> tuple[Tensor, ...]:
    """Call a function with the tensors of each dtype and device, and with their places."""
    found: dict[int, Tensor] = {}
    for places in kinds(tensors):
        found.update(zip(places, function([tensors[place] for place in places], places), strict=True))
    return tuple(found[place] for place in range(len(tensors)))


class _Gather(torch.autograd.Function):
    """Parts → whole tensors in each rank's own computation; with ``asks``, not all may get a gradient on a rank."""

    apply: ClassVar[Any]

    @staticmethod
    def forward(ranks: Ranks, shapes: Sequence[torch.Size], asks: bool, *parts: Tensor) -> tuple[Tensor, ...]:
        def whole(parts: Sequence[Tensor], places: list[int]) -> list[Tensor]:
            own = torch.cat([part.detach() for part in parts])
            rows = own.new_empty(ranks.size, len(own))
            ranks.group.all_gather(list(rows.unbind()), own)
            pieces = zip(places, rows.split([len(part) for part in parts], 1), strict=True)
            # Each in memory of its own, as a dual of a part of another tensor has a tangent of that one's size.
            return [piece.clone().flatten()[: shapes[at].numel()].view(shapes[at]) for at, piece in pieces]

        return _by_kind(parts, whole)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.ranks, ctx.shapes, ctx.asks, *_ = inputs
        ctx.set_materialize_grads(not ctx.asks)

    @staticmethod
    def backward(ctx: Any, *bars: OptionalTensor) -> tuple[Any, ...]:
        if all(bar is None for bar in bars):
            return None, None, None, *bars
        filled = ctx.ranks.filled(bars, ctx.shapes) if ctx.asks else bars
        found = iter(_Scatter.apply(ctx.ranks, *(bar for bar in filled if bar is not None)))
        return None, None, None, *(None if bar is None else next(found) for bar in filled)

    @staticmethod
    def jvp(ctx: Any, ranks: None, shapes: None, asks: None, *tangents: Tensor) -> tuple[Tensor, ...]:
        return tuple(_Gather.apply(ctx.ranks, ctx.shapes, ctx.asks, *tangents))


class _Scatter(torch.autograd.Function):
    """Each rank's own tensors → the parts of their means; the transpose of :class:`_Gather`."""

    apply: ClassVar[Any]

    @staticmethod
    def forward(ranks: Ranks, *tensors: Tensor) -> tuple[Tensor, ...]:
        def scattered(tensors: Sequence[Tensor], places: list[int]) -> Sequence[Tensor]:
            rows = _rows(ranks, tensors)
            own = torch.empty_like(rows[0])
            ranks.group.reduce_scatter(own, rows.view(-1))
            own /= ranks.size
            return own.split([-(-tensor.numel() // ranks.size) for tensor in tensors])

        return _by_kind(tensors, scattered)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.ranks, *tensors = inputs
        ctx.shapes = [tensor.shape for tensor in tensors]

    @staticmethod
    def backward(ctx: Any, *bars: Tensor) -> tuple[Any, ...]:
        return None, *_Gather.apply(ctx.ranks, ctx.shapes, False, *bars)

    @staticmethod
    def jvp(ctx: Any, ranks: None, *tangents: Tensor) -> tuple[Tensor, ...]:
        return tuple(_Scatter.apply(ctx.ranks, *tangents))
