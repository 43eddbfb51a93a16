"""Tensors found, others → a context in which others are in their places, and contexts that find them."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import optree
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torchopt_dist import pytree
from torchopt_dist.core.functional import replaced
from torchopt_dist.core.graphs import leaves_behind
from torchopt_dist.torch_private import (
    entrances_for_tensors,
    is_functorch_tensor,
    next_sequence_number,
    sequence_numbers,
    tensor_at_level,
    transform_level,
    transforms_are_active,
)

__all__ = ["Finding", "Substitute", "finding"]

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


class Finding(Substitute, ABC):
    """A context that finds the tensors from outside that may have a gradient; see :func:`finding`."""

    follows_graph = False
    """A graph from outside was differentiated, in which no others can be in the places of its tensors."""

    def __init__(self, known: Sequence[Tensor]) -> None:
        super().__init__((), ())
        self.points = known
        self.known = {id(tensor): tensor for tensor in known}
        self.found: list[Tensor] = []
        self.entered: set[int] = set()
        """The ids of what has entered an operation."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        self.known.update((id(tensor), tensor) for tensor in _tensors_in(result))
        return result

    @property
    def stand_ins(self) -> list[Tensor]:
        """What is in the places of ``found``."""
        return [self.stand_in_of(tensor) for tensor in self.found]

    @abstractmethod
    def used_by(self, values: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Those of ``found`` on which values depend, and leaves on which they depend in a way that was not seen."""


def finding(known: Sequence[Tensor], outside: Sequence[Tensor], name: str) -> Finding:
    """A context in which a function is called once, which finds the tensors from outside that it takes.

    Later calls are made inside of a :class:`Substitute`, with others in the places of these.

    Args:
        known: the function's arguments; outside of ``torch.func``, they are leaves.
        outside: tensors that the function reaches by its names.
        name: its name, for messages.
    """
    return _Watch(known, outside, name) if transforms_are_active() else _StandIns(known, outside)


class _Watch(Finding):
    """Records the tensors of a transform that come from outside; nothing is replaced."""

    def __init__(self, known: Sequence[Tensor], outside: Sequence[Tensor], name: str) -> None:
        super().__init__(known)
        self.name = name
        self.outside = {id(tensor) for tensor in outside}
        self.level = transform_level()

    def used_by(self, values: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """All, since there is no graph to look at."""
        return self.found, []

    def _other(self, leaf: Any) -> Any:
        self.entered.add(id(leaf))
        if isinstance(leaf, Tensor) and id(leaf) not in self.known:
            self.known[id(leaf)] = leaf
            self._note(leaf)
        return leaf

    def _note(self, tensor: Tensor) -> None:
        inner = tensor_at_level(tensor, self.level)
        if inner is not tensor and id(inner) in self.outside - self.known.keys():
            raise ValueError(
                f"inside a `torch.func` transform, `{self.name}` must not apply another one to a tensor that it "
                f"closes over: pass `functools.partial({self.name}, tensor)` instead"
            )
        if inner is tensor and (is_functorch_tensor(tensor) or tensor.requires_grad):
            self.found.append(tensor)


class _StandIns(Finding):
    """Replaces each tensor from outside that requires grad by a leaf with its values."""

    def __init__(self, known: Sequence[Tensor], outside: Sequence[Tensor]) -> None:
        super().__init__(known)
        self.outside = {id(tensor) for tensor in outside}
        self.since = next_sequence_number()

    def used_by(self, values: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """By a walk over the values' graph, which begins at stand-ins and arguments."""
        reached, hidden = leaves_behind(values, [*self.points, *self.stand_ins])
        return [tensor for tensor in self.found if id(self.others[id(tensor)]) in reached], hidden

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _FOLLOWING_GRAPHS and any(map(self._is_outside, _tensors_in(args[:1]))):
            self.follows_graph = True
            result = func(*args, **(kwargs or {}))
            self.known.update((id(tensor), tensor) for tensor in _tensors_in(result))
            return result
        return super().__torch_function__(func, types, args, kwargs)

    def _other(self, leaf: Any) -> Any:
        self.entered.add(id(leaf))
        # Where a tensor enters other than as an argument of an operation, what is asked here comes here, too.
        if id(leaf) not in self.others and isinstance(leaf, Tensor) and self._is_outside(leaf):
            stand_in = leaf.detach().requires_grad_()
            if id(leaf) not in self.others:
                self.others[id(leaf)] = self.known[id(stand_in)] = stand_in
                self.found.append(leaf)
        return self.others.get(id(leaf), leaf)

    def _is_outside(self, tensor: Tensor) -> bool:
        if id(tensor) in self.known or not tensor.requires_grad:
            return False
        node = tensor.grad_fn  # results of autograd functions are not seen, but their nodes are new
        return node is None or id(tensor) in self.outside or sequence_numbers(node)(node) < self.since


def _tensors_in(tree: Any) -> list[Tensor]:
    """The tensors of a tree, without what is in objects."""
    return [leaf for leaf in optree.tree_leaves(tree) if isinstance(leaf, Tensor)]
