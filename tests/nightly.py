"""Tests of several parameters → which rows ``make test`` runs, and which it leaves to ``make nightly``.

A decorator ``parametrize`` is a factor, and its rows are the values; so is a fixture with parameters. Of a product of
three factors or more, the rows stay that together have each pair of values; of two factors, each value. The others get
the marker ``nightly``. The rows of one decorator are a list of cases, and no product: all stay.

A product of less than ``WORTH_IT`` rows stays whole, and so does one with the marker ``every_row``. Rows that are
skipped here stay, too, and are no cover.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import pytest

WORTH_IT = 8
SHORT = "not nightly"
"""What `pyproject.toml` gives to `-m`."""


def cover(rows: Sequence[Sequence[Hashable]]) -> list[int]:
    """The places of rows that together have each pair of values that any row has; of two columns, each value."""
    columns = [column for column in zip(*rows, strict=True) if len(set(column)) > 1]
    if len(columns) < 2:
        return [*range(len(rows))]
    together = min(2, len(columns) - 1)
    parts = [{*itertools.combinations(enumerate(row), together)} for row in zip(*columns, strict=True)]
    missing = set().union(*parts)
    uses: Counter[Any] = Counter()
    kept = []
    while missing:
        # Of rows with equally many that are missing, the first one whose values have been used least.
        news = [(len(part & missing), -sum(uses[one] for one in part)) for part in parts]
        place = news.index(max(news))
        kept.append(place)
        missing -= parts[place]
        uses.update(parts[place])
    return sorted(kept)


def same(value: Any) -> Hashable:
    """What is equal where two rows have one value: plain values are compared, others are one object."""
    return (type(value), value) if isinstance(value, str | bytes | int | float | None) else id(value)


def values_of(item: pytest.Item, params: dict[str, Any]) -> list[Hashable]:
    """What stands in an item's row: a value for each decorator, then for each fixture."""
    found: list[Hashable] = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0]
        names = names.split(",") if isinstance(names, str) else names
        found.append(tuple(same(params.pop(name.strip())) for name in names))
    return found + [same(value) for value in params.values()]


def is_left_alone(mark: pytest.Mark) -> bool:
    """Whether a row with this mark takes no part: it is nightly by itself, or is skipped here."""
    return mark.name in ("nightly", "skip") or (mark.name == "skipif" and any(mark.args))


def leave_rows(items: Iterable[pytest.Item]) -> None:
    """Mark the rows that the short suite can do without."""
    functions: dict[str, list[tuple[pytest.Item, list[Hashable]]]] = defaultdict(list)
    for item in items:
        spec = getattr(item, "callspec", None)
        if (
            spec
            and not any(item.iter_markers("every_row"))
            and not any(map(is_left_alone, item.iter_markers()))
        ):
            functions[item.nodeid.partition("[")[0]].append((item, values_of(item, dict(spec.params))))
    for rows in functions.values():
        if len(rows) >= WORTH_IT:
            kept = {*cover([values for _, values in rows])}
            for place, (item, _) in enumerate(rows):
                if place not in kept:
                    item.add_marker(pytest.mark.nightly)


def give_named_ones_whole(config: pytest.Config) -> None:
    """Who names a test on the command line, and no marker, gets all rows of it."""
    if config.option.markexpr == SHORT and any("::" in name for name in config.args):
        config.option.markexpr = ""
