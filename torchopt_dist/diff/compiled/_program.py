"""A function of a step's parts and tensors → its program for steps of one kind, kept for the process.

A kind is one loss, one structure of parameters, and one kind of optimizer; a loop makes all of them anew each time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from torchopt_dist import pytree
from torchopt_dist.core.programs import CompileMode, Program, code_of
from torchopt_dist.diff.compiled._functions import Parts

__all__ = ["program_for"]

_BY_KIND = tuple(f"parts.{name}" for name in Parts._fields if name not in ("call", "optimizer"))
"""What the names of guards begin with on what is the same for all steps of a kind."""


def program_for(
    function: Callable[..., Any],
    parts: Parts,
    loss: Callable[..., Any],
    code: frozenset[Any],
    mode: CompileMode,
) -> Program:
    """The program for steps of this kind, or a new one; ``code`` is that of all that a step calls."""
    trees = tuple(str(pytree.flatten(tree)[1]) for tree in (parts.template, parts.argument))
    call: Any = (code_of(loss), code)
    rest = parts._replace(call=call, optimizer=code_of(parts.optimizer), template=trees, argument=None)
    return _program(function, rest, mode)


@lru_cache(maxsize=64)
def _program(function: Callable[..., Any], kind: Parts, mode: CompileMode) -> Program:
    return Program(
        function,
        "an inner loop",
        _BY_KIND,
        captured=mode == "reduce-overhead",
        again=(_program, (function, kind, mode)),
    )
