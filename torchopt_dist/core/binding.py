"""A function that runs again later → the same function, whose names then mean what they meant at the call.

Python looks a name up when a function runs. So a loss that runs again in a backward pass would see what a loop around
it has bound to its names since: another task's data, and a wrong gradient. What is noted at the call is compared when
the function runs again. While it is the same, that is all, and the function itself runs. Where names of variables,
attributes or entries were bound anew, a copy of the function runs that has them as they were, and copies of whatever
leads to them: functions that it calls, objects, modules, lists. Nothing of the caller's is written, so threads do not
meet. A tensor that was changed in place cannot be given back: that is an error, as torch's own is. Autocast and the
default dtype and device are those of the call, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable
from types import CellType, FunctionType, MethodType
from typing import Any

import numpy as np
from torch import Tensor, nn

from torchopt_dist.core.bound import Bound
from torchopt_dist.core.copies import Copies
from torchopt_dist.core.inputs import Seen
from torchopt_dist.core.reached import (
    CONTAINERS,
    NUMBERS,
    Walk,
    is_structure,
    map_parts,
    name_of,
    parts_of,
)
from torchopt_dist.core.surroundings import modes
from torchopt_dist.core.uncompiled import uncompiled

__all__ = ["Bindings", "bind"]


@uncompiled
def bind(function: Callable[..., Any]) -> Bound:
    """A function → the same function, which can run again later; see :class:`Bound`."""
    return Bound(function, Bindings(function))


class Bindings:
    """What the names of functions mean now.

    Up to :meth:`settle` the functions run as they are. What has changed by then they have changed themselves, or it was
    changed for them, as a counter or the batch of a step is: such names go on as they are.

    Args:
        functions: functions, methods, callable objects, partials or containers of these. They are followed to what they
            reach by cells, global names, attributes and entries of containers, but not into installed packages.
    """

    __slots__ = ("_bound", "_copies", "_is_live", "_modes", "_nodes", "_places", "_seen")

    def __init__(self, *functions: Any) -> None:
        walk = Walk(functions)
        self._nodes, self._places = walk.nodes, walk.places
        self._seen = Seen(walk.tensors)
        self._bound: dict[int, Any] = {}
        self._copies: Copies | None = None
        self._is_live = True
        self._modes = modes()

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that the functions reach, parameters and buffers of modules among them, each once."""
        return self._seen.tensors

    def of(self, function: Any) -> Any:
        """One of the functions as one to be called, now and later.

        Of a tuple or another structure that is made of functions, as an optimizer is, those of the caller's are meant.
        """
        if function is None or id(function) not in self._nodes:
            return function
        if isinstance(function, tuple):
            return self._of_part(function)
        return self._once(function, lambda: Bound(function, self))

    def _of_part(self, part: Any) -> Any:
        called = part.func if isinstance(part, functools.partial) else part
        if isinstance(called, (FunctionType, MethodType)) and id(called) in self._nodes:
            return self.of(part)
        if id(part) not in self._nodes or not (is_structure(part) or type(part) in CONTAINERS):
            return part
        made = self._once(part, lambda: map_parts(part, self._of_part))
        return part if all(map(_is, parts_of(made), parts_of(part))) else made

    def _once(self, thing: Any, make: Callable[[], Any]) -> Any:
        """What is made for a thing, one for all places where it is."""
        if id(thing) not in self._bound:
            self._bound[id(thing)] = make()
        return self._bound[id(thing)]

    def settle(self) -> None:
        """From now on, functions see what was noted, other than what has changed until now."""
        self._is_live = False
        self._forget(self._changed())

    def again(self, function: Any) -> Any:
        """The function that does now what this one did at the call: itself, or a copy.

        Raises:
            RuntimeError: a tensor that it uses has been changed in place since, or a name has been bound anew that
                cannot be given back.
        """
        return function if self._is_live else self._with(function, self._changed())

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function as it was at the call; what the call itself changes goes on from there."""
        if self._is_live:
            return function(*args, **kwargs)
        changed = self._changed()
        function = self._with(function, changed)
        try:
            with self._modes.again():
                return function(*args, **kwargs)
        finally:
            self._forget(self._changed() - changed)

    def anew(self, *things: Any) -> list[Any]:
        """Functions, and other things they were noted with, as they were: also what they have changed themselves.

        What they change in their turn is theirs: copies are made each time.

        Raises:
            RuntimeError: as :meth:`again`.
        """
        self._check(things[0])
        changed = self._changed()
        if not changed:
            return list(things)
        copies = Copies(self._nodes, self._places, changed)
        return [copies.of(thing) for thing in things]

    def settle_tensors(self, used: Collection[int]) -> list[Tensor]:
        """The tensors that have been changed in place.

        From now on they are not looked at, and neither are those that were not used.

        Args:
            used: the ids of those that were.
        """
        moved = [self._seen.tensors[place] for place in self._seen.changed()]
        gone = {id(x) for x in moved}
        self._seen = Seen(x for x in self._seen.tensors if id(x) in used and id(x) not in gone)
        return moved

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that the functions reach, each once."""
        return [node.thing for node in self._nodes.values() if isinstance(node.thing, nn.Module)]

    @property
    def are_the_same(self) -> bool:
        """Whether nothing that the functions reach has changed since."""
        return self._is_live or not (self._seen.changed() or self._changed())

    def _check(self, function: Any) -> None:
        for place in self._seen.changed():
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of shape {tuple(self._seen.tensors[place].shape)} that `{name_of(function)}` uses, which runs "
                "again for its gradient. Change it after the backward pass, or give the function a clone"
            )

    def _with(self, function: Any, changed: frozenset[int]) -> Any:
        self._check(function)
        if not changed:
            return function
        copies = self._copies
        if copies is None or copies.changed != changed:
            copies = Copies(self._nodes, self._places, changed)
        made = copies.of(function)
        self._copies = copies  # which are complete
        return made

    def _changed(self) -> frozenset[int]:
        """The numbers of the places where there is something else now."""
        found = []
        for number, (container, key, value) in self._places.items():
            if key is None:
                if not _has_entries(container, value):
                    found.append(number)
                continue
            try:
                now = container.cell_contents if type(container) is CellType else container[key]
            except (KeyError, ValueError):
                found.append(number)
                continue
            if now is not value and not (type(now) in NUMBERS and type(now) is type(value) and now == value):
                found.append(number)
        return frozenset(found)

    def _forget(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._places.pop(number, None)
        moved = set(self._seen.changed())
        if moved:
            self._seen = Seen(one for place, one in enumerate(self._seen.tensors) if place not in moved)


def _has_entries(container: Any, entries: Any) -> bool:
    if isinstance(entries, np.ndarray):
        return container.shape == entries.shape and container.tobytes() == entries.tobytes()
    if len(container) != len(entries):
        return False
    if isinstance(entries, dict):
        return all(container.get(key, container) is value for key, value in entries.items())
    return all(map(_is, container, entries))


def _is(one: Any, other: Any) -> bool:
    return one is other
