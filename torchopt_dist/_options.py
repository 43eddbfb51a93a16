"""Options that a caller has written → an error, if one is misspelt, that says what was meant."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar, cast

__all__ = ["check_options", "close_to", "only_the_function", "unless"]

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def check_options(function: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raise ``TypeError`` for the first option that is not known.

    Args:
        function: the name of the function that was called.
        given: the names of the options that it was given.
        known: the names that it takes, in the order of its documentation.
    """
    for name in given:
        if name not in known:
            meant = close_to(name, known)
            remedy = meant or f"; its options are {', '.join(known)}"
            raise TypeError(f"{function} got an unexpected keyword argument {name!r}{remedy}")


def close_to(name: str, known: Collection[str]) -> str:
    """``": did you mean `x`?"``, if a known name resembles it; else nothing."""
    meant = difflib.get_close_matches(name, known, n=1)
    return f": did you mean `{meant[0]}`?" if meant else ""


def unless(
    mistaken: Callable[[tuple[Any, ...], dict[str, Any]], str | None],
) -> Callable[[FunctionT], FunctionT]:
    """Make a call raise ``TypeError`` where a text is made of its arguments, which says what to write."""

    def decorator(call: FunctionT) -> FunctionT:
        @functools.wraps(call)
        def checked(*args: Any, **kwargs: Any) -> Any:
            if (text := mistaken(args, kwargs)) is not None:
                raise TypeError(text)
            return call(*args, **kwargs)

        return cast("FunctionT", checked)

    return decorator


def only_the_function(call: FunctionT) -> FunctionT:
    """A function ``call(func, *, args=...)`` → the same, whose error for more arguments says what to write."""

    @functools.wraps(call)
    def checked(*positional: Any, **options: Any) -> Any:
        if len(positional) > 1:
            func = next((one for one in positional if callable(one)), positional[0])
            name = getattr(func, "__name__", "func")
            first = (
                ""
                if callable(positional[0])
                else f", and its first one is the function, not {positional[0]!r:.80}"
            )
            raise TypeError(
                f"{call.__name__}(func, *, args=(), kwargs={{}}, partitioner=...) has one argument without a name, got "
                f"{len(positional)}{first}: write `{call.__name__}({name}, args=(x,), partitioner=1)`, or "
                f"`remote_call({name}, 1, x)`"
            )
        return call(*positional, **options)

    return cast("FunctionT", checked)
