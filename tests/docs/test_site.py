"""What the site is made of beside its pages: links of files from outside, tables that pictures are drawn from."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from sphinx.ext.napoleon import Config, GoogleDocstring

DOCS = Path(__file__).resolve().parents[2] / "docs"


def imported(name: str, **known: Any) -> ModuleType:
    """A module of that folder, which finds some names when it is run."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    vars(module).update(known)
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


def test_a_notebook_s_page_has_its_text_and_its_code(tmp_path: Path) -> None:
    cells = [("markdown", ["# Title\n", "\n", "Text."]), ("code", ["x = 1\n", "print(x)"])]
    source = tmp_path / "try.ipynb"
    source.write_text(json.dumps({"cells": [{"cell_type": kind, "source": text} for kind, text in cells]}))
    page = imported("pages").notebook_page(source)
    assert page.startswith("# Title\n\nText.\n\n```{code-block} python\nx = 1\nprint(x)\n```\n")


@pytest.mark.parametrize("what", ["attribute", "data", "property", "function"])
def test_what_stands_before_a_colon_is_no_type(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(DOCS)  # as the configuration prepends it, and leaves it there
    hook = imported("conf", tags=set()).no_type_before_colon
    lines = ["For each method, of shape (queries,): a mean.", "", "Returns:", "    The value: a number.", ""]
    hook(None, what, "name", None, None, lines)
    parsed = str(GoogleDocstring(lines, what=what, name="name", options=None, config=Config()))
    assert "For each method, of shape (queries,): a mean." in parsed
    assert ":type:" not in parsed
    if what == "function":
        assert re.search(r"^:returns: The value: a number\.$", parsed, re.MULTILINE)
        assert ":rtype:" not in parsed


def test_an_old_address_leads_to_a_section_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(DOCS)
    conf = imported("conf", tags=set())
    assert [page for page in conf.SYNONYMS if not (DOCS / f"{page}.md").exists()] == []
    for old, target in conf.redirects.items():
        page, _, section = target.partition("#")
        text = (DOCS / old).with_name(page).resolve().with_suffix(".md").read_text("utf-8")
        headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
        sections = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
        assert not (DOCS / f"{old}.md").exists(), old
        assert section in sections | {""}, (old, target)


def test_costs_are_drawn_from_tables_that_are_there() -> None:
    pictures = imported("pictures")
    assert "ours" in pictures.table("benchmarks.md", "A MAML step")
    assert pictures.number("4,269,981 bytes") == 4269981
    peaks = pictures.costs()[2]
    recorded = peaks.pop("every step recorded")
    assert recorded > 100  # megabytes; the cell has seconds, too
    assert all(0 < peak < recorded for peak in peaks.values())
    with pytest.raises(ValueError, match=r"docs/benchmarks\.md has no table below '## Gone'"):
        pictures.table("benchmarks.md", "Gone")


def test_the_pictures_of_the_readme_are_drawn_from_what_is_there(world: Callable[..., Any]) -> None:
    """By a digest, since the last digits of a drawing depend on the machine."""

    def graph_of_a_call() -> str | None:
        return imported("pictures").graph_of_a_call()

    shown = re.findall(r"!\[.+\]\((.+)\)", (DOCS.parent / "README.md").read_text("utf-8"))
    assert shown == [f"docs/images/{name}.svg" for name in ("costs", "call")]
    for name, digest in imported("pictures").digests(world(2).run(graph_of_a_call)[0]).items():
        svg = (DOCS / "images" / f"{name}.svg").read_text("utf-8")
        assert svg.rstrip().endswith(f"<!-- {digest} -->\n</svg>"), "run `make pictures`, and look at it"


def test_examples_are_run_as_they_say_and_those_that_fail_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pages = imported("pages")
    (tmp_path / "examples").mkdir()
    (tmp_path / "outputs").mkdir()
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.setattr(pages, "PICTURES", tmp_path / "pictures")
    monkeypatch.setattr(pages, "TIMES", tmp_path / "pictures" / "times.json")
    monkeypatch.setattr(pages, "SECONDS", 20)
    (tmp_path / "examples" / "draws.py").write_text("open('outputs/draws.png', 'w').close()")
    (tmp_path / "examples" / "fails.py").write_text("raise SystemExit(3)")
    assert pages.run_examples([]) == ["fails"]
    assert re.search(r"^fails by `python`: \d+ s, FAILED$", capsys.readouterr().out, re.MULTILINE)
    assert (tmp_path / "pictures" / "draws.png").exists()
    assert set(pages.known_times()) == {"draws"}
    with pytest.raises(ValueError, match=r"EXAMPLE must be one of draws, fails, got drawn$"):
        pages.run_examples(["drawn"])

    spread = tmp_path / "spread.py"
    spread.write_text('"""torchrun --nproc_per_node=2 spread.py"""')
    assert list(pages.ways_to_run(spread)) == [pages.ALONE, pages.SPREAD]


def test_a_card_shows_the_times_that_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = imported("pages")
    monkeypatch.setattr(pages, "TIMES", tmp_path / "times.json")
    texts = {"one": "Text.", "two": "Text. *Workers.*", "short": "Text. *One process.*", "new": "Text."}
    cards = [f":::{{grid-item-card}} {name}\n:link: {name}\n\n{text}\n:::\n" for name, text in texts.items()]
    times = {name: {pages.ALONE: 30.0, pages.SPREAD: 16.2} for name in ("two", "short")}
    pages.TIMES.write_text(json.dumps({"one": {pages.ALONE: 7.4}, **times}))
    one, two, short, new = pages.with_times("\n".join(cards)).split("\n\n:::")
    assert one == cards[0].removesuffix(":::\n") + "\n7 s by itself.\n:::"
    assert two.endswith("\n\nText. *Workers.*\n\n30 s by itself, 16 s on two workers.\n:::")
    assert short.endswith("\n\nText. *One process.*\n\n30 s by itself.\n:::")
    assert new.endswith("\n\nText.\n:::\n")
    assert pages.that_do_not_pay("\n".join(cards)) == []
    times = {name: {pages.ALONE: 30.0, pages.SPREAD: 20.0} for name in ("two", "short")}
    pages.TIMES.write_text(json.dumps(times))
    assert pages.that_do_not_pay("\n".join(cards)) == ["two: 1.50 times as fast on two workers"]
