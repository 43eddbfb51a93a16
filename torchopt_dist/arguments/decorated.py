"""A decorator, its first argument → the decorated function, if that is the argument: ``@decorator`` alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

from torchopt_dist.arguments import options

__all__ = ["decorated_alone"]


def decorated_alone(decorator: Callable[[], Callable[..., Any]], argument: object) -> Any:
    """What ``@decorator`` without parentheses makes of the function below it; to be called in the decorator itself.

    A decorator's first argument may be a function of the user, too: it is the decorated one if the call stands in the
    lines that define it.

    Returns:
        ``decorator()(argument)``; ``None`` if the argument is no function, or no decorated one.
    """
    if not isinstance(argument, FunctionType) or argument.__name__ == "<lambda>":
        return None
    # A frame in a variable of its own would stay until the next garbage collection, and all locals of its callers too.
    caller = inspect.currentframe()
    for _ in range(2):
        caller = caller and caller.f_back
    while caller is not None and caller.f_code.co_filename == options.__file__:
        caller = caller.f_back
    code = inspect.unwrap(argument).__code__
    if caller is None or code not in caller.f_code.co_consts:
        return None
    last = max(line for _, _, line in code.co_lines() if line is not None)
    return decorator()(argument) if code.co_firstlineno <= caller.f_lineno <= last else None
