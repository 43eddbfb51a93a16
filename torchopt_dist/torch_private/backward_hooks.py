"""Torch's record of a module's backward hooks, which holds the module → one that lets go of a clone.

A graph holds this record, and the record its module. The parameters of a moved clone are of that graph, so the two hold
each other, by nodes in C++ through which Python's garbage collector does not see.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import nn

from torchopt_dist.torch_private.lookup import find

__all__ = ["let_graphs_drop"]

_originals: weakref.WeakKeyDictionary[nn.Module, nn.Module] = weakref.WeakKeyDictionary()
"""The parts of clones that have backward hooks → those of the modules that were cloned."""


def let_graphs_drop(parts: Sequence[nn.Module], originals: Sequence[nn.Module]) -> None:
    """Have graphs not hold the parts of a clone by their backward hooks; a hook is given the original in its place.

    While the clone lives, its hooks are given its own parts. Without the names a clone with backward hooks stays in
    memory for good.

    Args:
        parts: those of the clone.
        originals: those of the module, in the same order.
    """
    for part, original in zip(parts, originals, strict=True):
        if getattr(part, "_backward_hooks", None) or getattr(part, "_backward_pre_hooks", None):
            _originals[part] = _originals.get(original, original)
            _let_go()


def _let_go() -> None:
    """Put the other class where modules look for torch's: among their own names, or, in some versions, in its home."""
    for home in map(find, ("nn.modules.module", "utils.hooks")):
        plain = getattr(home, "BackwardHook", None)
        if plain is not None and not hasattr(plain, "lets_clones_go"):
            home.BackwardHook = _letting_go(plain)


def _letting_go(plain: Any) -> Any:
    class BackwardHook(plain):
        """As torch's, but for clones."""

        lets_clones_go = True

        @property
        def module(self) -> nn.Module | None:
            part = self._part()
            return self._original if part is None else part

        @module.setter
        def module(self, part: nn.Module) -> None:
            self._original = _originals.get(part)
            self._part = (lambda: part) if self._original is None else weakref.ref(part)

    return BackwardHook
