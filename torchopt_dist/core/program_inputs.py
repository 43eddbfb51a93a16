"""Things and arguments → the key of a call of a program, and the tensors, arrays and numbers that are its inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchopt_dist import pytree
from torchopt_dist.core.meaning import Meaning, Record, kind_of

__all__ = ["Call", "Named"]

Named = tuple[str, Any]
"""What a message calls a thing, and the thing."""

_CONSTANTS = frozenset((bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size))
"""Of arguments: what is part of the key as it is."""


class Call:
    """What a body is called with.

    Args:
        meaning_of: things, and the meaning that comes before theirs → their meaning.
        things: functions and objects.
        arguments: trees, whose tensors, arrays and numbers are inputs; other objects in them are further things.
        name_of: what messages call each argument, or by number each leaf of them.
        base: the meaning of things that come first.

    Raises:
        RefusedError: something has no key.
    """

    def __init__(
        self,
        meaning_of: Callable[[Sequence[Named], Meaning | None], Meaning],
        things: Iterable[Named],
        arguments: Sequence[Any],
        name_of: Callable[[int], str] | Sequence[str],
        base: Meaning | None = None,
    ) -> None:
        self._meaning_of, self._names, self._base = meaning_of, name_of, base
        self.leaves: list[Any]
        tree: Any = list(arguments)
        self.leaves, self.spec = pytree.flatten(tree)
        self.tensors: list[Tensor] = []
        self.arrays: dict[int, np.ndarray[Any, Any]] = {}
        """By the places of leaves, as the next two."""
        self.objects: dict[int, int] = {}
        """The numbers of the things that leaves are."""
        self.number_of: dict[int, int] = {}
        """The numbers of leaves that are numbers."""
        signature: list[Any] = []
        numbers: list[float] = []
        named = list(things)
        before = 0 if base is None else len(base.things)
        self._things = named
        for place, leaf in enumerate(self.leaves):
            kind_of_leaf = type(leaf)
            if isinstance(leaf, Tensor):
                self.tensors.append(leaf)
                signature.append(kind_of(leaf))
            elif kind_of_leaf is int or kind_of_leaf is np.int64 or _is_usual(leaf):
                self.leaves[place] = leaf if kind_of_leaf is float else int(leaf)
                self.number_of[place] = len(numbers)
                numbers.append(self.leaves[place])
                signature.append(kind_of_leaf)
            elif kind_of_leaf is float:
                signature.append(repr(leaf))  # by which a zero has a sign, and NaN is itself
            elif kind_of_leaf in _CONSTANTS:
                signature.append((kind_of_leaf, leaf))
            elif kind_of_leaf is np.ndarray and not leaf.dtype.hasobject:
                self.arrays[place] = leaf
                signature.append((kind_of_leaf, leaf.dtype, leaf.shape, leaf.strides, leaf.flags.writeable))
            else:
                self.objects[place] = before + len(named)
                signature.append(self.objects[place])
                named.append((self._name_of(place), leaf))
        self.instead: dict[int, Tensor] = {}
        """What is an input in the place of a tensor that is reached, by its id."""
        self.meaning = base if base is not None and not named else meaning_of(named, base)
        self.numbers: tuple[float, ...] = (*numbers, *self.meaning.values)
        self.signature = tuple(signature)

    def anew(self) -> Call:
        """The same with what things mean now."""
        made = copy(self)
        base = self._base if self._base is None else self._base.anew()
        made.meaning = base if base is not None and not self._things else self._meaning_of(self._things, base)
        made.numbers = (*self.numbers[: len(self.number_of)], *made.meaning.values)
        return made

    def extended(self, others: Mapping[int, Tensor], more: Any) -> Call:
        """The same with other tensors at places of leaves, and one more argument, of tensors."""
        made, leaves = copy(self), list(self.leaves)
        for place, tensor in others.items():
            leaves[place] = tensor
        arguments: Any = pytree.unflatten(self.spec, leaves)
        tree: Any = [*arguments, more]
        made.leaves, made.spec = pytree.flatten(tree)
        made.tensors = [leaf for leaf in made.leaves if isinstance(leaf, Tensor)]
        made.signature = (
            *self.signature,
            *(None if one is None else kind_of(one) for one in made.leaves[len(leaves) :]),
        )
        return made

    @property
    def indices(self) -> set[int]:
        """Of the numbers, those of arguments that are whole, as an index is."""
        return {n for place, n in self.number_of.items() if type(self.leaves[place]) is int}

    def inputs(self) -> list[Any]:
        """The tensors of the arguments, those that are reached, and those of arrays, which come in the same order."""
        arrays = (*self.arrays.values(), *self.meaning.arrays)
        of_arrays = [torch.from_numpy(one if one.flags.writeable else one.copy()) for one in arrays]
        reached = self.meaning.tensors
        if self.instead:
            reached = [self.instead.get(id(x), x) for x in reached]
        return [*self.tensors, *reached, *of_arrays]

    @property
    def record(self) -> Record:
        """All that programs depend on, for messages."""
        own, names = self.meaning.record, list(map(self._name_of, range(len(self.leaves))))
        numbers = [(names[place], self.leaves[place]) for place in self.number_of]
        return Record(
            (self.spec, *self.signature, *own.key),
            ("how arguments are nested", *names, *own.places),
            (*numbers, *own.numbers),
            own.alive,
        )

    def _name_of(self, place: int) -> str:
        if callable(self._names):
            return self._names(place)
        accessor = self.spec.accessors()[place]
        return self._names[accessor[0].entry] + accessor[1:].codify("")


def _is_usual(leaf: Any) -> bool:
    """Whether it is a number that does not decide by itself, as zero does."""
    return type(leaf) is float and leaf != 0 and math.isfinite(leaf)
