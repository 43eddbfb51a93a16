"""Options that a caller has written → an error, if one is misspelt; a decorator alone → the decorated function."""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
from collections.abc import Callable, Collection, Iterable
from types import FunctionType, ModuleType
from typing import Any, TypeVar, cast, get_args, get_type_hints

__all__ = [
    "check_options",
    "close_to",
    "decorated_alone",
    "hint_all",
    "hinted",
    "not_callable",
    "only_the_function",
    "unless",
]


FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
FEW = 3
"""Options, from which on one needs to be reminded of their names."""
PACKAGE = "torchopt_dist"


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


def hinted(call: FunctionT) -> FunctionT:
    """Make the ``TypeError`` for a keyword that a function does not take say what was meant."""
    return cast("FunctionT", _checked(call, call.__qualname__))


def hint_all(*modules: ModuleType, but: Collection[str]) -> None:
    """Do as :func:`hinted` with the functions and classes that modules offer, if these have options to be misspelt.

    Args:
        modules: they are loaded, and so is all that has these functions by name.
        but: names of functions that are left as they are.
    """
    made: dict[Any, Any] = {}
    for thing in [getattr(module, name) for module in modules for name in module.__all__ if name not in but]:
        is_class = isinstance(thing, type) and not issubclass(thing, BaseException)
        call = vars(thing).get("__init__") if is_class else thing
        if not isinstance(call, FunctionType) or hasattr(call, "__wrapped__"):
            continue
        if (typed := _typed_options(call)) or (len(_named(call)) >= FEW and not _takes_all(call)):
            checked = _checked(call, thing.__name__, typed=typed)
            if is_class:
                thing.__init__ = checked
            else:
                made[call] = checked
    for place in [vars(module) for name, module in sys.modules.items() if name.startswith(PACKAGE)]:
        place.update(
            {n: made[each] for n, each in place.items() if type(each) is FunctionType and each in made}
        )


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
    typed: tuple[str, ...] = (),
) -> Callable[..., Any]:
    code = call.__code__
    own = code.co_varnames[:1] == ("self",)
    known = (*_named(call), *typed)
    takes = None if _takes_all(call) and not typed else frozenset(known)
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


def _named(call: FunctionType | Callable[..., Any]) -> tuple[str, ...]:
    """The parameters that can be given by name, without ``self``."""
    code = call.__code__
    names = code.co_varnames[code.co_posonlyargcount : code.co_argcount + code.co_kwonlyargcount]
    return names[1:] if names[:1] == ("self",) else names


def _takes_all(call: Callable[..., Any]) -> bool:
    return bool(call.__code__.co_flags & inspect.CO_VARKEYWORDS)


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


def only_the_function(name: str) -> Callable[[tuple[Any, ...], dict[str, Any]], str | None]:
    """For :func:`unless`: what to write in the place of more arguments than one to ``name(func, *, args=...)``."""

    def mistaken(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        del kwargs
        if len(args) <= 1:
            return None
        func = next((one for one in args if callable(one)), args[0])
        own = getattr(func, "__name__", "func")
        first = "" if callable(args[0]) else f", and its first one is the function, not {args[0]!r:.80}"
        return (
            f"{name}(func, *, args=(), kwargs={{}}, partitioner=...) has one argument without a name, got {len(args)}"
            f"{first}: write `{name}({own}, args=(x,), partitioner=1)`, or `remote_call({own}, 1, x)`"
        )

    return mistaken


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
    while caller is not None and caller.f_code.co_filename == __file__:
        caller = caller.f_back
    code = inspect.unwrap(argument).__code__
    if caller is None or code not in caller.f_code.co_consts:
        return None
    last = max(line for _, _, line in code.co_lines() if line is not None)
    return decorator()(argument) if code.co_firstlineno <= caller.f_lineno <= last else None
