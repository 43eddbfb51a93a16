"""Files outside of this folder → pages in ``docs/_site``: examples, notebooks, CONTRIBUTING.md, CHANGELOG.md, SKILL.md.

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
from typing import NamedTuple

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
FOLDER = DOCS / "_site"
PICTURES = DOCS / "_pictures"
TIMES = PICTURES / "times.json"
SECONDS = 300
"""That an example may take."""
ALONE, SPREAD = "by `python`", "by `torchrun` on two workers"
CARD = re.compile(r"(^:::\{grid-item-card\} (\w+)\n(?:(?!:::).*\n)+):::\n", re.MULTILINE)
WORKERS = "*Workers.*"
"""With this a card says that a second worker pays; other cards show no time of two."""
PAYS = 1.6
"""How many times as fast two workers are at least where that pays."""
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
        gallery = {match[2]: match[1] for match in CARD.finditer((DOCS / "gallery.md").read_text("utf-8"))}
        shown = times[source.stem] if WORKERS in gallery.get(source.stem, "") else [ALONE]
        took = " and ".join(f"{times[source.stem][where]:.0f} s {where}" for where in shown)
        parts.append(f"It took {took}, when these pages were built.")
    parts += [
        rest.strip("\n"),
        f"```{{literalinclude}} ../../examples/{source.name}\n:language: python\n:lines: {first + 2}-\n```\n",
    ]
    return "\n\n".join(parts)


def notebook_page(source: Path) -> str:
    """A notebook's cells: its text, and its code."""
    notebook = json.loads(source.read_text("utf-8"))
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in notebook["cells"]]
    parts = [f"```{{code-block}} python\n{text}\n```" if kind == "code" else text for kind, text in cells]
    return "\n\n".join([*parts, f"This is `examples/{source.name}`.\n"])


def known_times() -> dict[str, dict[str, float]]:
    """Example → how it was started → seconds."""
    found: dict[str, dict[str, float]] = json.loads(TIMES.read_text()) if TIMES.exists() else {}
    return found


def run_examples(names: list[str]) -> list[str]:
    """Run every example, or those named, in the default setting, and keep what came of it.

    Returns:
        The examples that failed, or took longer than ``SECONDS``; what was known of them is kept.

    Raises:
        ValueError: there is no example of a name.
    """
    sources = {source.stem: source for source in sorted((ROOT / "examples").glob("*.py"))}
    if unknown := [name for name in names if name not in sources]:
        raise ValueError(f"EXAMPLE must be one of {', '.join(sources)}, got {', '.join(unknown)}")
    return [name for name in names or sources if run_example(sources[name]) is None]


class Run(NamedTuple):
    """A program's run that went well."""

    seconds: float
    printed: str


def run_example(source: Path) -> dict[str, Run] | None:
    """Run a program in the default setting in each way that it can be started, and keep its picture and its times.

    Returns:
        How it was started → that run; ``None`` if one failed, or took longer than ``SECONDS``: what was known is kept.
    """
    runs: dict[str, Run] = {}
    for where, command in ways_to_run(source).items():
        start = time.perf_counter()
        try:
            done = subprocess.run(
                [*command, source], cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=SECONDS
            )
            well = done.returncode == 0
        except subprocess.TimeoutExpired:
            well = False
        seconds = time.perf_counter() - start
        print(f"{source.stem} {where}: {seconds:.0f} s{'' if well else ', FAILED'}", flush=True)
        if not well:
            return None
        runs[where] = Run(seconds, done.stdout)
    PICTURES.mkdir(exist_ok=True)
    took = {where: run.seconds for where, run in runs.items()}
    TIMES.write_text(json.dumps({**known_times(), source.stem: took}, indent=1))
    drawn = ROOT / "outputs" / f"{source.stem}.png"
    if drawn.exists():
        shutil.copy(drawn, PICTURES)
    return runs


def ways_to_run(source: Path) -> dict[str, list[str]]:
    """How an example says that it is started."""
    ways = {ALONE: [sys.executable]}
    if "torchrun --nproc_per_node=2" in source.read_text("utf-8"):
        ways[SPREAD] = [*ways[ALONE], "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    return ways


def with_times(gallery: str) -> str:
    """The gallery's page, on whose cards stands how long the examples took, where that is known."""

    def card(match: re.Match[str]) -> str:
        took = known_times().get(match[2])
        if took is None:
            return match[0]
        shown = f"{took[ALONE]:.0f} s by itself"
        if WORKERS in match[1] and SPREAD in took:
            shown += f", {took[SPREAD]:.0f} s on two workers"
        return f"{match[1]}\n{shown}.\n:::\n"

    return CARD.sub(card, gallery)


def that_do_not_pay(gallery: str) -> list[str]:
    """The cards which say that a second worker pays, where it was measured that it does not."""
    found = []
    for card, name in CARD.findall(gallery):
        took = known_times().get(name, {})
        if WORKERS in card and SPREAD in took and took[ALONE] < PAYS * took[SPREAD]:
            found.append(f"{name}: {took[ALONE] / took[SPREAD]:.2f} times as fast on two workers")
    return found


def write(name: str, text: str) -> None:
    """Write a page, unless it is there: Sphinx reads again what has changed."""
    path = FOLDER / name
    path.parent.mkdir(exist_ok=True)
    if not path.exists() or path.read_text("utf-8") != text:
        path.write_text(text, encoding="utf-8")


def make() -> None:
    """Make all pages."""
    for name in ("CONTRIBUTING", "CHANGELOG", "SKILL"):
        write(f"{name.lower()}.md", with_links_of_the_site((ROOT / f"{name}.md").read_text("utf-8")))
    for source in sorted((ROOT / "examples").glob("*.py")):
        write(f"example_{source.stem}.md", example_page(source))
    for source in sorted((ROOT / "examples").glob("*.ipynb")):
        write(f"notebook_{source.stem}.md", notebook_page(source))


if __name__ == "__main__":
    failed = run_examples(sys.argv[1:])
    print(*that_do_not_pay((DOCS / "gallery.md").read_text("utf-8")), sep="\n")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")
