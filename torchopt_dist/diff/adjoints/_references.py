"""A module → how much refers to it and to its parts.

A checkpoint, or a hook of a tensor, that calls the module in a backward pass holds on to the module, to a sub-module,
or to a dictionary of either. CPython counts such references, so looking takes microseconds.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from typing import Any

from torch import nn

from torchopt_dist.torch_private import buffers_of, children_of, parameters_of

__all__ = ["holders", "references"]


def holders(parts: Sequence[nn.Module]) -> list[Any]:
    """The objects by which one can hold on to a module: all its parts and their dictionaries."""
    registers = [register(part) for register in (parameters_of, buffers_of, children_of) for part in parts]
    return [*parts, *map(vars, parts), *filter(None, registers)]  # there is no way from an empty one


def references(objects: Sequence[Any]) -> list[int]:
    """How many references there are to each object, and weak ones to each module."""
    weak = [weakref.getweakrefcount(one) for one in objects if isinstance(one, nn.Module)]
    return [*map(sys.getrefcount, objects), *weak]
