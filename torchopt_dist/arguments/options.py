"""Options that a caller has written → an error, if one is misspelt, that says what was meant."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar, cast, get_args, get_type_hints

__all__ = ["check_options", "close_to", "hinted", "not_callable", "only_the_function", "unless"]

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
HintedT = TypeVar("HintedT", bound=Callable[..., Any])
"""A function or a class."""


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


def hinted(call: HintedT) -> HintedT:
    """Make the ``TypeError`` for a keyword that a function or class does not take say what was meant."""
    made: Any = call
    if isinstance(call, type):
        made.__init__ = _checked(made.__init__, call.__name__)
    else:
        made = _checked(call, call.__qualname__)
    return cast("HintedT", made)


def unless(
    mistaken: Callable[[tuple[Any, ...], dict[str, Any]], str | None],
) -> Callable[[FunctionT], FunctionT]:
    """As :func:`hinted`; and make a call raise ``TypeError`` where a text is made of its arguments."""

    def decorator(call: FunctionT) -> FunctionT:
        made: Any = call
        if isinstance(call, type):
            made.__init__ = _checked(made.__init__, call.__name__, mistaken)
            return call
        return cast("FunctionT", _checked(made, made.__name__, mistaken))

    return decorator


def _checked(
    call: Callable[..., Any],
    name: str,
    mistaken: Callable[[tuple[Any, ...], dict[str, Any]], str | None] | None = None,
) -> Callable[..., Any]:
    code = call.__code__
    own = code.co_varnames[:1] == ("self",)
    named = code.co_varnames[code.co_posonlyargcount : code.co_argcount + code.co_kwonlyargcount]
    typed = _typed_options(call) if mistaken is None else ()
    known = (*(named[1:] if own else named), *typed)
    takes = None if code.co_flags & inspect.CO_VARKEYWORDS and not typed else frozenset(known)
    most = None if code.co_flags & inspect.CO_VARARGS else code.co_argcount
    by_name = (*code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount], *typed)

    @functools.wraps(call)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if mistaken is not None and (text := mistaken(args, kwargs)) is not None:
            raise TypeError(text)
        if takes is not None and not takes.issuperset(kwargs):
            check_options(name, kwargs, known)
        if most is not None and len(args) > most and by_name:
            raise TypeError(
                f"{name} takes {most - own} without a name, got {len(args) - own}: by their names it takes "
                f"{', '.join(by_name)}"
            )
        return call(*args, **kwargs)

    return checked


def _typed_options(call: Callable[..., Any]) -> tuple[str, ...]:
    """The names of the options of a function that takes ``**options: Unpack[Options]``."""
    for name, hint in call.__annotations__.items():
        if str(hint).startswith("Unpack["):
            return tuple(get_args(get_type_hints(call)[name])[0].__annotations__)
    return ()


def not_callable(argument: str, got: object) -> TypeError:
    """The error for what is no function; it may be what a function has returned."""
    return TypeError(
        f"{argument} must be callable, got {type(got).__name__} {got!r:.80}: give the function itself, `main`, not "
        "what it returns, `main()`"
    )


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
