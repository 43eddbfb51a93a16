"""Options that a caller has written → an error, if one is misspelt, that says what was meant."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

__all__ = ["check_options", "close_to"]


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
