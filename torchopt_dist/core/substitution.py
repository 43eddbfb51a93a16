"""Tensors found, others → a context in which others are in their places, and contexts that find them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Self

import optree
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torchopt_dist import pytree
from torchopt_dist.core.functional import replaced
from torchopt_dist.torch_private import (
    entrances_for_tensors,
    is_functorch_tensor,
    next_sequence_number,
    sequence_numbers,
    tensor_at_level,
    transform_level,
)

__all__ = [
    "Edge",
    "OnlyThese",
    "StandIns",
    "Substitute",
    "Watch",
    "edge_of",
    "tensors_in",
]

Edge = tuple[Any, int]
"""A node of the graph, and which of its results."""
_LEAVES = (bool, int, float, str, torch.dtype, torch.device)
_FOLLOWING_GRAPHS = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)


class Substitute(TorchFunctionMode):
    """Replaces the tensors found by others, also in arguments of autograd functions and of what ``torch.func`` maps.

    Args:
        found: the tensors.
        others: what stands for each.
        met: gets the ids of the tensors that are replaced.
    """

    def __init__(
        self, found: Sequence[Tensor], others: Sequence[Tensor], met: set[int] | None = None
    ) -> None:
        super().__init__()
        self.met = set() if met is None else met
        self.others = {id(old): new for old, new in zip(found, others, strict=True)}
        self.entered: set[int] = set()
        """The ids of what has entered an operation, where contexts note it that find tensors."""
        self.entrances = contextlib.ExitStack()

    def __enter__(self) -> Self:
        for module, name in entrances_for_tensors():
            self.entrances.enter_context(replaced(module, {name: self._enter}))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: object) -> None:
        self.entrances.close()
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    def _enter(self, torchs: Callable[..., Any], given: Any, *rest: Any) -> Any:
        if isinstance(given, tuple):  # what is deeper within has no gradient there
            return torchs(tuple(self._other(arg) for arg in given), *rest)
        return torchs(self._other(given), *rest)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = [self._replaced(arg) for arg in args]
        if kwargs:
            return func(*args, **{name: self._replaced(arg) for name, arg in kwargs.items()})
        return func(*args)

    def stand_in_of(self, leaf: Any) -> Any:
        """What is in the place of a leaf that has gone through no operation."""
        return self._other(leaf)

    def _replaced(self, arg: Any) -> Any:
        if isinstance(arg, Tensor):
            return self._other(arg)
        if arg is None or isinstance(arg, _LEAVES):
            return arg
        return pytree.tree_map(self._other, arg)

    def _other(self, leaf: Any) -> Any:
        other = self.others.get(id(leaf))
        if other is None:
            return leaf
        self.met.add(id(leaf))
        return other


class Watch(Substitute):
    """Records the tensors of a transform that come from outside; nothing is replaced."""

    def __init__(self, known: Sequence[Tensor], closed_over: Sequence[Tensor], name: str = "matvec") -> None:
        super().__init__((), ())
        self.name = name
        self.closed_over = {id(tensor) for tensor in closed_over}
        self.level = transform_level()
        self.known = {id(tensor): tensor for tensor in known}
        self.found: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        self.known.update((id(tensor), tensor) for tensor in tensors_in(result))
        return result

    def _other(self, leaf: Any) -> Any:
        self.entered.add(id(leaf))
        if isinstance(leaf, Tensor) and id(leaf) not in self.known:
            self.known[id(leaf)] = leaf
            self._note(leaf)
        return leaf

    def _note(self, tensor: Tensor) -> None:
        inner = tensor_at_level(tensor, self.level)
        if inner is not tensor and id(inner) in self.closed_over - self.known.keys():
            raise ValueError(
                f"inside a `torch.func` transform, `{self.name}` must not apply another one to a tensor that it "
                f"closes over: pass `functools.partial({self.name}, tensor)` instead"
            )
        if inner is tensor and (is_functorch_tensor(tensor) or tensor.requires_grad):
            self.found.append(tensor)


class _FromOutside(Substitute):
    """Tells which tensors come from outside and require grad, of those that are not known."""

    def __init__(
        self,
        found: Sequence[Tensor],
        others: Sequence[Tensor],
        known: Sequence[Tensor],
        outside: Sequence[Tensor],
    ) -> None:
        super().__init__(found, others)
        self.outside = {id(tensor) for tensor in outside}
        self.known = {id(tensor): tensor for tensor in [*others, *known]}
        self.since = next_sequence_number()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        self.known.update((id(tensor), tensor) for tensor in tensors_in(result))
        return result

    def _other(self, leaf: Any) -> Any:
        self.entered.add(id(leaf))
        # Where a tensor enters other than as an argument of an operation, what is asked here comes here, too.
        if id(leaf) not in self.others and isinstance(leaf, Tensor) and self._is_outside(leaf):
            self._meet(leaf)
        return self.others.get(id(leaf), leaf)

    def _is_outside(self, tensor: Tensor) -> bool:
        if id(tensor) in self.known or not tensor.requires_grad:
            return False
        node = tensor.grad_fn  # results of autograd functions are not seen, but their nodes are new
        return node is None or id(tensor) in self.outside or sequence_numbers(node)(node) < self.since

    def _meet(self, tensor: Tensor) -> None:
        """Do something about a tensor from outside."""
        raise NotImplementedError


class StandIns(_FromOutside):
    """Replaces each tensor from outside that requires grad by a leaf with its values; ``found`` are these tensors."""

    def __init__(self, known: Sequence[Tensor], outside: Sequence[Tensor]) -> None:
        super().__init__((), (), known, outside)
        self.found: list[Tensor] = []
        self.follows_graph = False
        """A graph from outside was differentiated, which stand-ins are not in."""

    @property
    def leaves(self) -> list[Tensor]:
        """What stands in the places of ``found``."""
        return [self.others[id(tensor)] for tensor in self.found]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _FOLLOWING_GRAPHS and any(map(self._is_outside, tensors_in(args[:1]))):
            self.follows_graph = True
            result = func(*args, **(kwargs or {}))
            self.known.update((id(tensor), tensor) for tensor in tensors_in(result))
            return result
        return super().__torch_function__(func, types, args, kwargs)

    def _meet(self, tensor: Tensor) -> None:
        stand_in = tensor.detach().requires_grad_()
        if id(tensor) not in self.others:
            self.others[id(tensor)] = self.known[id(stand_in)] = stand_in
            self.found.append(tensor)


class OnlyThese(_FromOutside):
    """As :class:`Substitute`, and refuses other tensors that come from outside and require grad."""

    def __init__(self, known: Sequence[Tensor], found: Sequence[Tensor], others: Sequence[Tensor]) -> None:
        super().__init__(found, others, known, ())

    def _meet(self, tensor: Tensor) -> None:
        raise ValueError(
            "`matvec` must take the same tensors in each call, also in backward: it now takes one of shape "
            f"{tuple(tensor.shape)} that it did not take in the solver's call. Pass "
            "`functools.partial(matvec, tensor)` with what is changed or made anew"
        )


def edge_of(tensor: Tensor) -> Edge:
    """The node that made a tensor, or that accumulates a leaf's gradient, and which of its results the tensor is."""
    with torch.enable_grad():
        if (
            tensor.grad_fn is None and tensor.layout != torch.strided
        ):  # torch asks a view, which a sparse tensor lacks
            copied: Any = tensor.clone().grad_fn
            found: Edge = copied.next_functions[0]
            return found
        edge = torch.autograd.graph.get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors of a tree, without what is in objects."""
    return [leaf for leaf in optree.tree_leaves(tree) if isinstance(leaf, Tensor)]
