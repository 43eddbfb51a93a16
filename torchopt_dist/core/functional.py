"""Functions of torch, and others → the others in their places, for one thread, in a context."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

__all__ = ["Place", "ReplacementFn", "Replacements", "replaced"]

ReplacementFn = Callable[..., Any]
"""The function that it replaces, then that one's arguments → what that one returns."""


Place = tuple[ModuleType | type, str]
"""A module or a class of torch, and a function's name in it."""


class _Places:
    """What is in the places of torch's functions, which are one for all threads; each thread chooses for itself."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.counts: dict[Place, int] = {}
        self.torchs: dict[Place, Callable[..., Any]] = {}


class _Chosen(threading.local):
    """Of this thread: replacements, the innermost last."""

    def __init__(self) -> None:
        self.at: dict[Place, list[tuple[ReplacementFn, Callable[[], bool] | None]]] = {}


_places = _Places()
_chosen = _Chosen()


@contextmanager
def replaced(
    module: ModuleType | type, functions: Mapping[str, ReplacementFn], where: Callable[[], bool] | None = None
) -> Iterator[None]:
    """A context in which this thread calls others wherever it asks a module by a name.

    Args:
        module: ``torch``, another module of torch, or a class of torch, for ``__new__``.
        functions: name → what is called. Its first argument is the function that it replaces, torch's or that of a
            context around this one.
        where: whether to call it, asked at each call; always, if not given.
    """
    by_place = {(module, name): function for name, function in functions.items()}
    with _places.lock:
        for place in by_place:
            _enter(place)
    for place, function in by_place.items():
        _chosen.at.setdefault(place, []).append((function, where))
    try:
        yield
    finally:
        for place in by_place:
            _chosen.at[place].pop()
        with _places.lock:
            for place in by_place:
                _leave(place)


class Replacements:
    """What this thread has in the places of functions now, which can be put there again later, in any thread.

    Args:
        but: places that are left out, now and later.
    """

    def __init__(self, but: Collection[Place] = ()) -> None:
        self._but = but
        self._at = {place: list(made) for place, made in _chosen.at.items() if made and place not in but}

    @contextmanager
    def again(self) -> Iterator[None]:
        """A context in which these functions, and no others, are in the places of torch's."""
        before = _chosen.at
        kept = {place: before[place] for place in self._but if place in before}
        with _places.lock:
            for place in self._at:
                _enter(place)
        _chosen.at = {**{place: list(made) for place, made in self._at.items()}, **kept}
        try:
            yield
        finally:
            _chosen.at = before
            with _places.lock:
                for place in self._at:
                    _leave(place)


def _enter(place: Place) -> None:
    """One context more needs a place; under the lock."""
    if not _places.counts.get(place):
        own = _places.torchs[place] = getattr(*place)
        stand_in: Any = partial(_call, place, own)
        stand_in.__name__ = place[1]  # which torch asks for where it lists its functions
        setattr(*place, stand_in)
    _places.counts[place] = _places.counts.get(place, 0) + 1


def _leave(place: Place) -> None:
    _places.counts[place] -= 1
    if not _places.counts[place]:
        setattr(*place, _places.torchs[place])


def _call(place: Place, torchs: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    function = torchs
    for replacement, where in _chosen.at.get(place, ()):
        if where is None or where():
            function = partial(replacement, function)
    return function(*args, **kwargs)
