"""A table of short checks runs to its end, and names each row that fails."""

from __future__ import annotations

import inspect

import pytest

from tests.rows import each_row


def test_every_row_runs_and_each_that_fails_is_named() -> None:
    seen = []

    @each_row("a", [1, 2])
    @each_row(("b", "c"), [(3, 4), pytest.param(5, 6, id="the last one")])
    def check(folder: str, a: int, b: int, c: int) -> None:
        seen.append((folder, a, b, c))
        assert b == 3

    assert [*inspect.signature(check).parameters] == ["folder"]
    with pytest.RaisesGroup(pytest.RaisesGroup(AssertionError), pytest.RaisesGroup(AssertionError)) as told:
        check(folder="here")
    assert seen == [("here", a, b, c) for a in (1, 2) for b, c in ((3, 4), (5, 6))]
    assert told.value.exceptions[1].__notes__ == ["the row is {'a': 2}"]
    assert told.value.exceptions[1].exceptions[0].__notes__ == ["the row is the last one"]


def test_rows_may_be_named_beside_them() -> None:
    @each_row("a", [len, abs], ids={"the length": 1, "the size": 2})
    def check(a: object) -> None:
        assert a is len

    with pytest.raises(BaseExceptionGroup) as told:
        check()
    assert told.value.exceptions[0].__notes__ == ["the row is the size"]


def test_a_row_that_is_skipped_is_no_cover() -> None:
    @each_row("a", [1, 2])
    def check(a: int) -> None:
        if a == 2:
            pytest.skip("not here")

    with pytest.raises(BaseExceptionGroup, match="1 of 2 rows fail"):
        check()


def test_no_row_is_no_table() -> None:
    with pytest.raises(AssertionError, match="no rows for a"):
        each_row("a", [])
    with pytest.raises(AssertionError, match="has marks"):
        each_row("a", [pytest.param(1, marks=pytest.mark.nightly)])
