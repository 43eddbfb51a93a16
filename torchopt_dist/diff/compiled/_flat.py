"""A loop → the same loop in one vector: all moved parameters in one tensor, and each kind of the optimizer's state.

A program of many small tensors spends its time on handing them over, and makes a kernel for each. So an optimizer that
treats each element by itself gets one vector; others, such as Muon, keep their tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import optree
import torch
from torch import Tensor, nn

from torchopt_dist import pytree
from torchopt_dist.core.types import OptState
from torchopt_dist.diff.adjoints._carry import Carry
from torchopt_dist.diff.adjoints._declared import depend_on_each_other
from torchopt_dist.diff.adjoints._loop import Loop
from torchopt_dist.diff.adjoints._model import Model
from torchopt_dist.transform.base import is_of_elements

__all__ = ["FlatModel", "Pieces", "flattened"]

Pieces = tuple[tuple[int, int, tuple[int, ...]], ...]
"""For each parameter in the vector: its place among the leaves, its size, and its shape."""


class FlatModel(Model):
    """A model whose only leaf is a vector of the moved parameters of another model."""

    def __init__(self, model: Model, places: Sequence[int]) -> None:
        self.model, self._spec = model, None
        leaves = [(place, model.leaves[place]) for place in places]
        self.pieces: Pieces = tuple((place, leaf.numel(), tuple(leaf.shape)) for place, leaf in leaves)
        self.leaves = [self.vector(model.leaves)]
        self.buffers = model.buffers
        self.moved_places, self.first_places = [0], [0]

    def vector(self, leaves: Sequence[Tensor]) -> Tensor:
        """The vector of leaves of the other model."""
        return torch.cat([leaves[place].reshape(-1) for place, *_ in self.pieces])

    def split(self, vector: Tensor, leaves: Sequence[Any] | None = None) -> list[Any]:
        """The leaves of the other model, or others, with those that are in a vector in their places."""
        found = list(self.model.leaves if leaves is None else leaves)
        vectors = vector.split([size for _, size, _ in self.pieces])
        for (place, _, shape), part in zip(self.pieces, vectors, strict=True):
            found[place] = part.view(shape)
        return [found[place] for place in self.model.first_places]

    def filled(self, leaves: Sequence[Tensor], buffers: Sequence[Tensor]) -> Any:
        return self.model.filled(self.split(leaves[0]), buffers)

    def fresh(self) -> Model:
        made = object.__new__(type(self))
        vars(made).update(vars(self))
        made.model = self.model.fresh()
        return made

    def key(self) -> nn.Module | None:
        return self.model.key()

    def leave(self) -> None:
        self.model.leave()

    def let_go(self) -> None:
        self.model.let_go()

    def buffers_now(self) -> list[Tensor]:
        return self.model.buffers_now()

    def result(self, leaves: Sequence[Tensor], buffers: Sequence[Tensor], *, last: bool = False) -> Any:
        return self.model.result(self.split(leaves[0]), buffers, last=last)

    def flat_state(self, state: OptState, like: OptState) -> OptState | None:
        """A state of the other model's tree → one of the vector, as ``like`` has it; ``None`` where there is none."""

        def joined(leaf: Any, part: Any) -> Any:
            leaves = pytree.flatten(part)[0]
            if not isinstance(leaf, Tensor):
                return leaf
            if leaf.shape == self.leaves[0].shape:
                return self.vector(leaves)
            counts = [leaves[place] for place, *_ in self.pieces] if len(leaves) > 1 else leaves
            if any(not torch.equal(count, counts[0]) for count in counts):
                raise LookupError
            return counts[0]

        try:
            return _zipped(joined, like, state)
        except LookupError:  # the parameters have made different numbers of steps
            return None

    def state_of_tree(self, state: OptState, like: OptState) -> OptState:
        """A state of the vector → one of the other model's tree, as ``like`` has it where nothing was moved."""

        def parted(leaf: Any, part: Any) -> Any:
            leaves, spec = pytree.flatten(part)
            if not isinstance(leaf, Tensor):
                return part
            if leaf.shape == self.leaves[0].shape:
                return pytree.unflatten(spec, self.split(leaf, leaves))
            for place in [place for place, *_ in self.pieces] if len(leaves) > 1 else [0]:
                leaves[place] = leaf
            return pytree.unflatten(spec, leaves)

        return _zipped(parted, state, like)


def flattened(loop: Loop, used: Sequence[bool]) -> tuple[Loop, OptState] | None:
    """The loop in one vector, and its first state as it was; ``None`` where it cannot be.

    Args:
        loop: the loop.
        used: whether each leaf has a gradient; what has none is not in the vector.
    """
    model = loop.model
    places = [place for place in model.moved_places if used[place]]
    kinds = {(model.leaves[place].dtype, model.leaves[place].device) for place in places}
    if len(places) < 2 or len(kinds) > 1 or any(model.leaves[place].is_complex() for place in places):
        return None
    if not is_of_elements(loop.optimizer):
        return None
    flat = FlatModel(model, places)
    state = flat.flat_state(loop.first.state, loop.optimizer.init(flat.leaves[0].detach()))
    if state is None:
        return None
    first = Carry(flat.leaves, state, loop.first.buffers)
    made = replace(loop, model=flat, first=first)
    if depend_on_each_other(made.tensors) and not depend_on_each_other(loop.tensors):
        return None  # the loss uses the first parameters themselves, too
    return made, loop.first.state


def _zipped(function: Callable[[Any, Any], Any], tree: Any, deeper: Any) -> Any:
    """A function of each leaf of a tree and of what is there in a deeper one of the same structure."""
    leaves, spec = optree.tree_flatten(tree, none_is_leaf=True)
    parts = spec.flatten_up_to(deeper)
    return optree.tree_unflatten(spec, [function(a, b) for a, b in zip(leaves, parts, strict=True)])
