"""A table of short checks → one test, which runs all of its rows and tells of each that fails.

``each_row`` stands where ``parametrize`` would, for rows that take less than a test of their own costs: to collect it,
to set it up, and to report it. All rows have the same fixtures, so what a row changes, it changes for those after it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet


def each_row(
    names: str | tuple[str, ...], rows: Iterable[Any], ids: Iterable[str] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Call a test with each row, in this order; above another ``each_row``, with each row of both.

    Args:
        names: of arguments, as for ``parametrize``.
        rows: a value for one name, or a tuple for several; a ``pytest.param`` may have an id, but no marks.
        ids: the rows' names, where their values would tell little.
    """
    keys = tuple(name.strip() for name in names.split(",")) if isinstance(names, str) else names
    table = [_values(row, len(keys)) for row in rows]
    assert table, f"no rows for {names}"
    if ids is not None:
        table = [(values, name) for (values, _), name in zip(table, ids, strict=True)]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(test)

        @functools.wraps(test)
        def all_rows(*args: Any, **kwargs: Any) -> None:
            failures: list[BaseException] = []
            for values, name in table:
                try:
                    test(*args, **kwargs, **dict(zip(keys, values, strict=True)))
                except (Exception, pytest.skip.Exception) as error:  # a skipped row would be no cover
                    error.add_note(f"the row is {name or dict(zip(keys, values, strict=True))}")
                    failures.append(error)
            if failures:
                raise BaseExceptionGroup(f"{len(failures)} of {len(table)} rows fail", failures)

        left = [one for name, one in signature.parameters.items() if name not in keys]
        vars(all_rows)["__signature__"] = signature.replace(parameters=left)
        return all_rows

    return decorate


def _values(row: Any, count: int) -> tuple[tuple[Any, ...], str | None]:
    if isinstance(row, ParameterSet):
        assert not row.marks, f"a row of `each_row` has marks: {row}"
        return tuple(row.values), None if row.id is None else str(row.id)
    return ((row,) if count == 1 else tuple(row)), None
