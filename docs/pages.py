"""Files outside of this folder → pages in ``docs/_site``: the examples, CONTRIBUTING.md, CHANGELOG.md.

They are made when the pages are built, and not committed. ``python docs/pages.py [EXAMPLE…]`` runs every example, or
those named, on one worker and on two, and keeps picture and times for the pages; that is ``make gallery``.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
FOLDER = DOCS / "_site"
PICTURES = DOCS / "_pictures"
TIMES = PICTURES / "times.json"
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
    """A program's docstring, its picture and its times if they were made, and its code."""
    tree = ast.parse(source.read_text("utf-8"))
    first = tree.body[0].end_lineno or 0
    docstring = re.sub(r"(https://[^\s),]+)", r"<\1>", ast.get_docstring(tree) or "")
    title, _, rest = docstring.replace("``", "`").partition("\n")
    parts = [f"# {source.stem}", title]
    if (PICTURES / f"{source.stem}.png").exists():
        parts.append(f"![What it draws](../_pictures/{source.stem}.png)")
    if source.stem in (times := known_times()):
        took = " and ".join(f"{seconds:.0f} s {where}" for where, seconds in times[source.stem].items())
        parts.append(f"It took {took}, when these pages were built.")
    parts += [
        rest.strip("\n"),
        f"```{{literalinclude}} ../../examples/{source.name}\n:language: python\n:lines: {first + 2}-\n```\n",
    ]
    return "\n\n".join(parts)


def known_times() -> dict[str, dict[str, float]]:
    """Example → how it was started → seconds."""
    found: dict[str, dict[str, float]] = json.loads(TIMES.read_text()) if TIMES.exists() else {}
    return found


def run_examples(names: list[str]) -> None:
    """Run every example, or those named, in the default setting; one that fails is left out, and said to be."""
    times = known_times()
    PICTURES.mkdir(exist_ok=True)
    for source in sorted((ROOT / "examples").glob("*.py")):
        if names and source.stem not in names:
            continue
        ways = {"by `python`": [sys.executable]}
        if "torchrun" in source.read_text("utf-8"):
            ways["by `torchrun` on two workers"] = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
            ]
            ways["by `torchrun` on two workers"] += ["--nproc_per_node=2"]
        took: dict[str, float] = {}
        for where, command in ways.items():
            print(f"{source.stem} {where}", flush=True)
            start = time.perf_counter()
            if subprocess.run([*command, source], cwd=ROOT, stdout=subprocess.DEVNULL).returncode:
                print(f"{source.stem} {where} failed")
                continue
            took[where] = time.perf_counter() - start
        drawn = ROOT / "outputs" / f"{source.stem}.png"
        if took:
            times[source.stem] = took
            if drawn.exists():
                shutil.copy(drawn, PICTURES)
    TIMES.write_text(json.dumps(times, indent=1))


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
    run_examples(sys.argv[1:])
