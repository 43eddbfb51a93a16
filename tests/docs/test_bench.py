"""``python benchmarks`` puts what a program prints into the program's place on its page, and nowhere else."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = """# Page

| question | program | peer | ratio |
|---|---|---|---|
| one | `one.py` | raw | 1.0 |
| two | `two.py` | torch | 9 |
| two | `two.py` | jax | 8 |
| three | `three.py` | raw | 3.0 |

<!-- bench: one -->
old one
<!-- end -->

By hand.

<!-- bench: two -->
old two
<!-- end -->
"""
PRINTED = "Of the time:\nratio | two | torch | 0.5\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n\nratio | new | numpy | 7\nSo."


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.delitem(sys.modules, "page", raising=False)
    return importlib.import_module("page")


def test_a_table_and_its_ratios_take_the_place_of_the_old(page: ModuleType) -> None:
    made = page.with_output(PAGE, "two", PRINTED, "today")
    table = "Of the time:\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\nSo.\n\n`python benchmarks/two.py`, today."
    expected = PAGE.replace("old two", table)
    expected = expected.replace("| two | `two.py` | torch | 9 |\n", "| two | `two.py` | torch | 0.5 |\n")
    expected = expected.replace("| two | `two.py` | jax | 8 |\n", "| new | `two.py` | numpy | 7 |\n")
    assert made == expected
    assert page.with_output(made, "two", PRINTED, "today") == made


def test_what_is_no_table_stands_as_it_was_printed(page: ModuleType) -> None:
    made = page.with_output(PAGE, "one", "  a 1\n  b 2\n", "today")
    block = "```text\na 1\n  b 2\n```\n\n`python benchmarks/one.py`, today."
    assert made == PAGE.replace("old one", block)


def test_nothing_printed_changes_nothing_and_a_place_must_be_there_once(page: ModuleType) -> None:
    assert page.with_output(PAGE, "one", "\n", "today") == PAGE
    for wrong, count in ((PAGE, 0), (PAGE + "<!-- bench: three -->\n" * 2 + "<!-- end -->", 2)):
        with pytest.raises(ValueError, match=f"must have one place `<!-- bench: three --> .*, has {count}"):
            page.with_output(wrong, "three", "1", "today")


def test_what_a_table_is_printed_as_is_found_again(
    page: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    page.table(["a", "b"], [["1", "2"]])
    page.ratio("one", "raw", "0.9")
    made = page.with_output(PAGE, "one", capsys.readouterr().out, "today")
    assert "| a | b |\n|---|---|\n| 1 | 2 |\n" in made
    assert "| one | `one.py` | raw | 0.9 |\n| two | `two.py` | torch | 9 |" in made
    assert "```" not in made


def test_every_program_has_its_place(page: ModuleType) -> None:
    spec = importlib.util.spec_from_file_location("all_programs", ROOT / "benchmarks" / "__main__.py")
    assert spec is not None
    assert spec.loader is not None
    programs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(programs)
    for program in programs.PROGRAMS:
        assert (ROOT / "benchmarks" / f"{program.name}.py").is_file()
        text = (ROOT / "docs" / program.page).read_text("utf-8")
        assert page.with_output(text, program.name, "1", "today") != text
