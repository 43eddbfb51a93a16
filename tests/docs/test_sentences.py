"""Pages are read by people in a hurry: at most three sentences of a page have more than 35 words.

Code, tables, headings and what benchmarks have printed do not count.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
WORDS, SENTENCES = 35, 3

NO_PROSE = re.compile(
    r"^(```|~~~).*?^\1$|<!-- bench: .*?<!-- end -->|<!--.*?-->|^(\||#|:::|:\w|!\[).*?$",
    re.DOTALL | re.MULTILINE,
)
"""Fenced code, generated tables, comments; and lines of tables, headings, directives and pictures."""
PARAGRAPH = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )")
"""Between two paragraphs, and before an item of a list."""
END_OF_SENTENCE = re.compile(r"(?<=[.!?])[*)\"]*\s+(?![a-z])")


def sentences(page: str) -> list[str]:
    """The sentences of a page, each on one line, with the words of links and without their targets."""
    prose = re.sub(r"\]\([^)]*\)", "]", NO_PROSE.sub("\n", page))
    paragraphs = (" ".join(paragraph.split()) for paragraph in PARAGRAPH.split(prose))
    return [sentence for text in paragraphs for sentence in END_OF_SENTENCE.split(text) if sentence]


def long_sentences(page: str) -> list[str]:
    return [sentence for sentence in sentences(page) if len(sentence.split()) > WORDS]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_few_sentences_of_a_page_are_long(page: Path) -> None:
    found = long_sentences(page.read_text("utf-8"))
    assert len(found) <= SENTENCES, f"{len(found)} sentences have more than {WORDS} words:\n" + "\n".join(
        found
    )


def test_the_readme_is_read_in_minutes() -> None:
    assert len(PAGES[0].read_text("utf-8").splitlines()) <= 150


def test_sentences_are_told_apart() -> None:
    page = "# A. B\n\nOne `a.b` is\n[it](x.md). *Two.* See\n- three: 1.5 e\n- four. (Five.) `s` is.\n\n| a | b. c |\n"
    page += "```python\nnot. This\n```\n<!-- bench: x -->\nNot this.\n<!-- end -->\n"
    assert sentences(page) == [
        "One `a.b` is [it].",
        "*Two.",
        "See",
        "- three: 1.5 e",
        "- four.",
        "(Five.",
        "`s` is.",
    ]
    assert long_sentences("W " * 35 + "w. " + "W " * 34 + "w.") == ["W " * 35 + "w."]
