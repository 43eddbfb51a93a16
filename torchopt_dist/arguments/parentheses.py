"""A decorator's first argument → an error, if that is the function that is being decorated."""

from __future__ import annotations

import inspect
from types import FunctionType

from torchopt_dist.arguments import options

__all__ = ["check_parentheses"]


def check_parentheses(decorator: str, argument: object) -> None:
    """Raise ``TypeError`` for ``@decorator`` without parentheses; to be called in the decorator's own function.

    A decorator's first argument may be a function of the user, too: it is the decorated one if the call stands in the
    lines that define it.
    """
    if not isinstance(argument, FunctionType) or argument.__name__ == "<lambda>":
        return
    # A frame in a variable of its own would stay until the next garbage collection, and all locals of its callers too.
    caller = inspect.currentframe()
    for _ in range(2):
        caller = caller and caller.f_back
    while caller is not None and caller.f_code.co_filename == options.__file__:
        caller = caller.f_back
    code = inspect.unwrap(argument).__code__
    if caller is None or code not in caller.f_code.co_consts:
        return
    last = max(line for _, _, line in code.co_lines() if line is not None)
    if code.co_firstlineno <= caller.f_lineno <= last:
        raise TypeError(
            f"`@{decorator}` decorates nothing without parentheses, and `{argument.__qualname__}` became its first "
            f"argument: write `@{decorator}()`"
        )
