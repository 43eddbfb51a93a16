"""Products of parameters → the rows of the short suite have each pair of values; lists of cases stay."""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter
from pathlib import Path

from tests import nightly
from tests.mutations import MUTATIONS
from tests.processes import python
from tests.rows import each_row

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = """
import pytest

@pytest.mark.parametrize("a", range(4))
@pytest.mark.parametrize(("b", "c"), [(1, "x"), (2, "x"), (2, "y")])
def test_two_factors(a, b, c): pass

@pytest.fixture(params=[True, False])
def flag(request): return request.param

@pytest.mark.parametrize("a", [len, abs, max])
@pytest.mark.parametrize("b", [0, 1])
def test_three_factors(a, b, flag): pass

@pytest.mark.parametrize("a", range(20))
def test_a_list(a): pass

@pytest.mark.every_row
@pytest.mark.parametrize("a", range(4))
@pytest.mark.parametrize("b", range(4))
def test_whole(a, b): pass

@pytest.mark.parametrize("a", [0, 1, 2, pytest.param(3, marks=pytest.mark.skipif("True", reason="-"))])
@pytest.mark.parametrize("b", range(3))
def test_skipped_rows_are_no_cover(a, b): pass

@pytest.mark.nightly
def test_by_hand(): pass
"""


def pairs(row: tuple[int, ...]) -> set[object]:
    return {*itertools.combinations(enumerate(row), 2)}


@each_row("seed", range(6))
def test_each_pair_of_values_occurs(seed: int) -> None:
    draw = random.Random(seed)
    sizes = [draw.randint(2, 6) for _ in range(draw.randint(3, 5))]
    rows = [row for row in itertools.product(*map(range, sizes)) if draw.random() < 0.9]  # of one with holes
    kept = [rows[place] for place in nightly.cover(rows)]
    assert set().union(*map(pairs, kept)) == set().union(*map(pairs, rows))
    assert len(kept) < len(rows)
    first, second = sorted(sizes)[-2:]
    assert len(kept) <= 2.5 * first * second


def test_of_two_columns_each_value_occurs_and_they_alternate() -> None:
    rows = [*itertools.product(range(8), "abcd", [None])]
    kept = [rows[place] for place in nightly.cover(rows)]
    assert [row[0] for row in kept] == [*range(8)]
    assert sorted(row[1] for row in kept) == [*"aabbccdd"]
    assert nightly.cover([(1,), (2,), (3,)]) == [0, 1, 2]


CONFTEST = """
from tests import nightly
from tests.mutations import MUTATIONS
pytest_configure = nightly.give_named_ones_whole
def pytest_collection_modifyitems(items): nightly.leave_rows(items)
"""
WHOLE = {
    "test_two_factors": 12,
    "test_three_factors": 12,
    "test_a_list": 20,
    "test_whole": 16,
    "test_skipped_rows_are_no_cover": 12,
    "test_by_hand": 1,
}
KEPT = {
    "test_two_factors": 4,
    "test_three_factors": 6,
    "test_a_list": 20,
    "test_whole": 16,
    "test_skipped_rows_are_no_cover": 3 + 3,
}


def test_what_runs_by_default_nightly_and_by_name(tmp_path: Path) -> None:
    program = tmp_path / "test_program.py"
    program.write_text(PROGRAM)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    options = ("-c", ROOT / "pyproject.toml", "--rootdir", tmp_path, "-p", "no:cacheprovider", "-q")

    def collected(*words: object) -> dict[str, int]:
        printed = python("-m", "pytest", *options, "--collect-only", *words).stdout
        return Counter(re.findall(r"^test_program\.py::(\w+)", printed, re.MULTILINE))

    assert collected(program) == KEPT
    assert collected(program, "-m", "nightly") == Counter(WHOLE) - Counter(KEPT)
    assert collected(f"{program}::test_two_factors") == {"test_two_factors": 12}


def test_targets_take_the_marker_as_they_say() -> None:
    targets = dict(re.findall(r"^(\w+): .*\n\t(.+)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    assert targets["test"] == "$(PYTEST) $(ARGS)"
    assert targets["nightly"] == "$(PYTEST) -m nightly $(ARGS)"
    assert "and not nightly" in targets["quick"]
    assert "nightly" not in (ROOT / ".ci" / "run").read_text("utf-8")


def test_each_mistake_made_on_purpose_still_has_its_place() -> None:
    for name, mistake in MUTATIONS.items():
        assert (ROOT / "torchopt_dist" / mistake.file).read_text("utf-8").count(mistake.old) == 1, name
        assert all((ROOT / "tests" / test).exists() for test in mistake.tests.split()), name
