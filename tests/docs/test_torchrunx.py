"""Every row of docs/coming_from.md on torchrunx names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "coming_from.md"


def rows() -> list[list[str]]:
    _, _, text = PAGE.read_text("utf-8").partition("\n## torchrunx\n")
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if row[0] != "promise"]


def names_of(file: Path) -> set[str]:
    tree = ast.parse(file.read_text("utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_there_is_a_row_for_every_promise() -> None:
    # Fourteen of the page on features, seven of the page on how it works.
    assert len(rows()) == 21


def test_a_promise_is_held_by_tests_that_exist() -> None:
    for row in rows():
        assert len(row) == 3, row
        named = re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", row[2])
        assert named, row
        for file, test in named:
            path = ROOT / "tests" / file
            assert path.is_file(), file
            found = names_of(path)
            assert any(name.startswith("test_") for name in found), file
            assert not test or test in found, f"{file}::{test}"
