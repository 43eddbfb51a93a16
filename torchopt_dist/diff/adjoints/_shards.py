"""A model, ranks → the same model for a loop in which each rank has a part of each parameter; the loss gets them whole.

So the optimizer's state, the history and the gradients that a backward pass keeps lie in parts, too, as in ZeRO
[Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054]: a step gathers the parameters and scatters the mean
gradients, which together are as many bytes as one all-reduce.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from torchopt_dist.core import remat
from torchopt_dist.core.graphs import edge_of
from torchopt_dist.core.types import OptionalTensor
from torchopt_dist.diff.adjoints._model import Model, ModuleModel
from torchopt_dist.diff.adjoints._ranks import Ranks, kinds, local
from torchopt_dist.transform.base import GradientTransformation, link_of_whole

__all__ = ["ShardedModel", "check_elementwise"]


class ShardedModel(Model):
    """A model whose moved parameters are this rank's parts, vectors of the same length on all ranks.

    Args:
        whole: the model; its parameters keep their history.
        ranks: those that have the parts.
        by_block: whether memory for all parameters at a time is to be spared where it can be.
    """

    def __init__(self, whole: Model, ranks: Ranks, *, by_block: bool = False) -> None:
        self.whole, self._ranks, self._by_block = whole, ranks, by_block
        self._inside: frozenset[int] = frozenset()
        """Places of parameters that are gathered in blocks."""
        self._turns: Counter[tuple[int, ...]] | None = None
        """With blocks, how often parameters were gathered; each time others of them get a gradient."""
        self._ranks_of: dict[Any, Ranks] = {}
        """For some parameters and their turn."""
        self.first_places, self.moved_places = whole.first_places, whole.moved_places
        self._spec, self.buffers = whole._spec, whole.buffers
        moved = [whole.leaves[place] for place in self.moved_places]
        self._shapes = [tensor.shape for tensor in moved]
        with (
            torch.enable_grad()
        ):  # the gradient of a part is zero elsewhere, and all ranks' sum is that of the whole
            same = local(Ranks(ranks.group, sums=True), moved)
            parts = [ranks.part([tensor]) for tensor in same]
        self.leaves = self._with(whole.leaves, parts)

    def gathered(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """Parts → whole parameters, whose gradients come back as the parts of their means."""
        found = {place: leaves[place] for place in self._inside}
        found |= self._whole_at([place for place in self.moved_places if place not in self._inside], leaves)
        return self._with(leaves, [found[place] for place in self.moved_places])

    def part(self, name: str) -> nn.Module:
        return self.whole.part(name)

    def in_blocks(self, names: Sequence[str]) -> Model:
        """As :meth:`Model.in_blocks`; a parameter that is used in blocks alone is gathered when one is called."""
        assert isinstance(self.whole, ModuleModel)
        made = copy.copy(self)
        count = Counter(index for _, _, index in self.whole.places_in(self.whole.part("")))
        of_blocks = [self.whole.places_in(self.whole.part(name)) for name in names]
        count.subtract(i for _, _, i in {(id(held), n, i) for block in of_blocks for held, n, i in block})
        made._inside = frozenset(place for place in self.moved_places if not count[place])
        made._turns = Counter()
        return made

    def block_forward(self, block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        if not self._inside:
            return forward
        assert isinstance(self.whole, ModuleModel)
        places = [place for place in self.whole.places_in(block) if place[2] in self._inside]

        def called(*args: Any, **kwargs: Any) -> Any:
            parts = {index: container[name] for container, name, index in places}
            whole = self._whole_at(list(parts), parts)
            try:
                for container, name, index in places:
                    container[name] = whole[index]
                return forward(*args, **kwargs)
            finally:
                for container, name, index in places:
                    container[name] = parts[index]

        return called

    def refuse_outside(self, nodes: Sequence[Any]) -> None:
        """Raise an error if a node of a loss's graph that is no block's uses a part of one of its parameters."""
        assert isinstance(self.whole, ModuleModel)
        held = self.whole.places_in(self.whole.part(""))
        parts = {
            edge_of(part): place
            for container, name, place in held
            if place in self._inside and (part := container[name]) is not None
        }
        for node in nodes:
            used = [parts[edge] for edge in node.next_functions if edge in parts]
            if used and not remat.is_node(node):
                raise ValueError(
                    "`loss` must use the parameters of `blocks` by calling these with `shard='parameters'`, since a "
                    f"rank has only parts of them elsewhere: it uses parameter {self.moved_places.index(used[0])} of "
                    "those that are moved outside of its block; give the optimizer the weight decay"
                )

    def _whole_at(self, places: list[int], leaves: Any) -> dict[int, Tensor]:
        """The whole parameters at some places."""
        if not places:
            return {}
        key = (*places, -1)
        if self._turns is not None:
            self._turns[tuple(places)] += 1
            key = (*places, self._turns[tuple(places)])
        if key not in self._ranks_of:
            moved = [self._ranks.moved[self.moved_places.index(place)] for place in places]
            self._ranks_of[key] = replace(self._ranks, moved=moved)
        shapes = [self._shapes[self.moved_places.index(place)] for place in places]
        made = _Gather.apply(self._ranks_of[key], shapes, True, *(leaves[place] for place in places))
        return dict(zip(places, made, strict=True))

    def filled(self, leaves: Sequence[Tensor], buffers: Sequence[Tensor]) -> Any:
        return self.whole.filled(self.gathered(leaves), buffers)

    def leave(self) -> None:
        self.whole.leave()

    def let_go(self) -> None:
        self.whole.let_go()

    def buffers_now(self) -> list[Tensor]:
        return self.whole.buffers_now()

    def result(self, leaves: Sequence[Tensor], buffers: Sequence[Tensor], *, last: bool = False) -> Any:
        together = [[place] for place in self.moved_places] if self._by_block else [[*self.moved_places]]
        found = {place: leaf for places in together for place, leaf in self._whole_at(places, leaves).items()}
        gathered = self._with(leaves, [found[place] for place in self.moved_places])
        for place in self.moved_places:
            if not gathered[place].requires_grad and leaves[place].requires_grad:
                gathered[place].requires_grad_()
        return self.whole.result([gathered[place] for place in self.first_places], buffers, last=last)

    def _with(self, leaves: Sequence[Tensor], moved: Sequence[Tensor]) -> list[Tensor]:
        made = list(leaves)
        for place, tensor in zip(self.moved_places, moved, strict=True):
            made[place] = tensor
        return [made[place] for place in self.first_places]


def check_elementwise(optimizer: GradientTransformation) -> None:
    """Check that an optimizer is declared to move each element by itself.

    Raises:
        ValueError: a link is not.
    """
    if (name := link_of_whole(optimizer)) is not None:
        raise ValueError(
            "`shard` of DataParallel must be None with an optimizer that combines the elements of parameters, as "
            "clipping by a norm, LAMB and Muon do, or that draws or counts for all of them: each rank would have a "
            f"part of them; got {name}, which is not declared to do without (todist.transform.of_elements)"
        )


def _rows(ranks: Ranks, tensors: Sequence[Tensor]) -> Tensor:
    """Tensors, laid out so that each rank's parts are one row."""
    flats = [tensor.detach().reshape(-1) for tensor in tensors]
    rests = [-len(flat) % ranks.size for flat in flats]
    rows = [
        nn.functional.pad(flat, (0, rest)) if rest else flat for flat, rest in zip(flats, rests, strict=True)
    ]
    return torch.cat([row.view(ranks.size, -1) for row in rows], 1)


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
        ctx.ranks.group.in_backward()
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
        ctx.ranks.group.in_backward()
        return None, *_Gather.apply(ctx.ranks, ctx.shapes, False, *bars)

    @staticmethod
    def jvp(ctx: Any, ranks: None, *tangents: Tensor) -> tuple[Tensor, ...]:
        return tuple(_Scatter.apply(ctx.ranks, *tangents))
