"""Names of parameters, patterns such as ``"encoder.*"`` → which names a pattern matches, or an error."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase

__all__ = ["check_patterns", "first_match", "listed"]


def first_match(name: str, patterns: Collection[str]) -> str | None:
    """The first pattern that matches a name; ``None`` if there is none.

    Args:
        name: a name, such as ``"0.weight"``.
        patterns: names with ``*`` for any characters, ``?`` for one, ``[ab]`` for one of these; case counts.
    """
    return next((pattern for pattern in patterns if fnmatchcase(name, pattern)), None)


def check_patterns(argument: str, patterns: Collection[str], names: Sequence[str]) -> None:
    """Check that each pattern matches a name, since one that does not is misspelt.

    Args:
        argument: the argument's name, for the error.
        patterns: the patterns.
        names: all names.

    Raises:
        ValueError: a pattern matches none of the names.
    """
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f"`{argument}` must have patterns that match a parameter, got {pattern!r}; the names are "
                f"{listed(names)}"
            )


def listed(names: Sequence[str], most: int = 8) -> str:
    """Names with commas, the first few of many."""
    more = f", and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
