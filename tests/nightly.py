"""Tests of several parameters → which rows ``make test`` runs, and which it leaves to ``make nightly``.

A decorator ``parametrize`` is a factor, and its rows are the values; so is a fixture with parameters. Of the product of
three factors or more, those rows stay that together have each pair of values; of two factors, each value. The others get
the marker ``nightly``. The rows of one decorator are a list of cases, and no product: all stay.

A product of less than ``WORTH_IT`` rows stays whole, and so does one with the marker ``every_row``. Rows that are skipped
on some machines stay too.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import pytest

WORTH_IT = 8

Row = Sequence[Hashable]


def cover(rows: Sequence[Row]) -> list[int]:
    """The places of rows that together have each pair of values that any row has; each value, of two columns."""
    columns = [column for column in zip(*rows, strict=True) if len(set(column)) > 1]
    if len(columns) < 2:
        return [*range(len(rows))]
    together = min(2, len(columns) - 1)
    parts = [{*itertools.combinations(enumerate(row), together)} for row in zip(*columns, strict=True)]
    missing = set().union(*parts)
    uses: Counter[Any] = Counter()
    kept = []
    while missing:
        # Among rows with equally many that are missing, one whose values have been used least.
        place = max(
            range(len(parts)),
            key=lambda i: (len(parts[i] & missing), -sum(uses[part] for part in parts[i]), -i),
        )
        kept.append(place)
        missing -= parts[place]
        uses.update(parts[place])
    return sorted(kept)


def factors(item: pytest.Item) -> list[tuple[Any, ...]]:
    """The values of an item's row: one tuple a decorator, then one a fixture."""
    params = dict(item.callspec.params)  # type: ignore[attr-defined]
    found = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0]
        names = names.split(",") if isinstance(names, str) else names
        found.append(tuple(params.pop(name.strip()) for name in names))
    return found + [(value,) for value in params.values()]


def same(value: Any) -> Hashable:
    """What is equal for one value in several rows: plain values are compared, others are one object."""
    return (type(value), value) if isinstance(value, str | bytes | int | float | None) else id(value)


def leave_rows(items: Iterable[pytest.Item]) -> None:
    """Mark the rows that the short suite can do without."""
    functions: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec"):
            functions[item.nodeid.partition("[")[0]].append(item)
    for rows in functions.values():
        rows = [row for row in rows if not {"nightly", "every_row", "skip", "skipif"} & {*row.keywords}]
        if len(rows) < WORTH_IT:
            continue
        values = [[tuple(map(same, factor)) for factor in factors(row)] for row in rows]
        kept = {*cover(values)}
        for place, row in enumerate(rows):
            if place not in kept:
                row.add_marker(pytest.mark.nightly)
