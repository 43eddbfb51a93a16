"""What the site is made of beside its pages: links of files from outside, tables that pictures are drawn from."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


def imported(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_of_a_file_outside_lead_to_pages_or_are_paths() -> None:
    text = "[a](docs/b.md#c), [d](csrc/README.md), [e](https://f.org), [LICENSE](LICENSE), [g](#h)"
    expected = "[a](../b.md#c), d (`csrc/README.md`), [e](https://f.org), LICENSE, [g](#h)"
    assert imported("pages").with_links_of_the_site(text) == expected


def test_an_example_s_page_has_its_docstring_and_then_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = imported("pages")
    monkeypatch.setattr(pages, "PICTURES", tmp_path)
    monkeypatch.setattr(pages, "TIMES", tmp_path / "times.json")
    source = tmp_path / "try.py"
    source.write_text('"""Try ``it``.\n\n    python try.py\n\nBy (X, https://x.org/1).\n"""\n\nx = 1\n')
    page = pages.example_page(source)
    assert page.startswith("# try\n\nTry `it`.\n\n    python try.py\n\nBy (X, <https://x.org/1>).\n")
    assert ":lines: 8-\n" in page
    assert "![" not in page
    (tmp_path / "try.png").touch()
    pages.TIMES.write_text('{"try": {"by `python`": 2.4}}')
    page = pages.example_page(source)
    assert "![What it draws](../_pictures/try.png)" in page
    assert "It took 2 s by `python`" in page


def test_costs_are_drawn_from_tables_that_are_there() -> None:
    pictures = imported("pictures")
    assert "ours" in pictures.table("benchmarks.md", "A MAML step")
    assert pictures.number("4,269,981 bytes") == 4269981
    with pytest.raises(ValueError, match=r"docs/benchmarks\.md has no table below '## Gone'"):
        pictures.table("benchmarks.md", "Gone")
