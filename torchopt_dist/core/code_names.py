"""Code → the names that it mentions; a package → whether it is installed, or the user's."""

from __future__ import annotations

import dis
import functools
import sys
from pathlib import PurePath
from types import CodeType
from typing import NamedTuple

__all__ = ["LIBRARIES", "is_installed", "reads", "top_package"]


class Reads(NamedTuple):
    """What code mentions, with that of the functions in it."""

    variables: frozenset[str]
    """Global names."""
    attributes: frozenset[str]
    """Names of attributes, and strings that may be such names."""
    assigned: frozenset[str]
    """Global names that it binds."""


@functools.lru_cache(maxsize=4096)
def reads(code: CodeType) -> Reads:
    """What code mentions."""
    variables: set[str] = set()
    attributes: set[str] = set()
    assigned: set[str] = set()
    for one in dis.get_instructions(code):
        if one.opname.startswith("LOAD"):
            if "GLOBAL" in one.opname or "NAME" in one.opname:
                variables.add(one.argval)
            elif "ATTR" in one.opname or "METHOD" in one.opname:
                attributes.add(one.argval)
        elif one.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            assigned.add(one.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner = reads(constant)
            variables |= inner.variables
            attributes |= inner.attributes
            assigned |= inner.assigned
        elif isinstance(constant, str) and constant.isidentifier():
            attributes.add(constant)
    return Reads(frozenset(variables), frozenset(attributes), frozenset(assigned))


LIBRARIES = sys.stdlib_module_names | {"torch", "torchopt_dist"}


@functools.lru_cache(maxsize=4096)
def is_installed(package: str) -> bool:
    """Whether a package is Python's, torch's, this one or one of those that are installed, by its place."""
    if package == "__main__":  # which may be a program that runs the user's, such as a debugger
        return False
    file = getattr(sys.modules.get(package), "__file__", None)
    return package in LIBRARIES or not {"site-packages", "dist-packages"}.isdisjoint(
        PurePath(file or "").parts
    )


def top_package(module: str) -> str:
    """The package at the top of a module's name."""
    return module.partition(".")[0]
