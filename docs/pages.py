"""Files outside of this folder → pages in ``docs/_site``: the examples, CONTRIBUTING.md, CHANGELOG.md.

They are made when the pages are built, and not committed.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
FOLDER = DOCS / "_site"
LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#|mailto:)([^)#]+)(#[^)]*)?\)")


def with_links_of_the_site(text: str) -> str:
    """A link into ``docs`` leads to that page; one to another file of the tree becomes the file's path."""

    def rewritten(match: re.Match[str]) -> str:
        words, path, anchor = match[1], match[2], match[3] or ""
        if path.startswith("docs/"):
            return f"[{words}](../{path.removeprefix('docs/')}{anchor})"
        return words if words == path else f"{words} (`{path}`)"

    return LINK.sub(rewritten, text)


def example_page(source: Path) -> str:
    """A program's docstring, its picture if there is one, and its code."""
    docstring = ast.get_docstring(ast.parse(source.read_text("utf-8"))) or ""
    title, _, rest = docstring.partition("\n")
    rest = rest.replace("``", "`")
    picture = f"![What it draws](../_pictures/{source.stem}.png)\n\n"
    return (
        f"# {source.stem}\n\n{title.replace('``', '`')}\n\n"
        + (picture if (DOCS / "_pictures" / f"{source.stem}.png").exists() else "")
        + f"{rest.strip()}\n\n```{{literalinclude}} ../../examples/{source.name}\n:language: python\n```\n"
    )


def write(name: str, text: str) -> None:
    """Write a page, unless it is there: Sphinx reads again what has changed."""
    path = FOLDER / name
    path.parent.mkdir(exist_ok=True)
    if not path.exists() or path.read_text("utf-8") != text:
        path.write_text(text, encoding="utf-8")


def make() -> None:
    """Make all pages."""
    for name in ("CONTRIBUTING", "CHANGELOG"):
        write(f"{name.lower()}.md", with_links_of_the_site((ROOT / f"{name}.md").read_text("utf-8")))
    for source in sorted((ROOT / "examples").glob("*.py")):
        write(f"example_{source.stem}.md", example_page(source))


if __name__ == "__main__":
    make()
