"""What a program measures → tables and ratios that it prints; what it prints → its place on a page of ``docs``.

A place is between ``<!-- bench: NAME -->`` and ``<!-- end -->``, and NAME is the program's. ``python benchmarks NAME``
runs the program and fills its place.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import os
import re
from collections.abc import Sequence

from torchopt_dist.bench import machine

END = "<!-- end -->"
RATIO = "ratio | "
PEERS = ("torchopt", "higher", "learn2learn", "torchrunx", "betty-ml", "evotorch")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table as a page has it."""
    print(f"\n| {' | '.join(header)} |\n|{'---|' * len(header)}")
    for row in rows:
        print(f"| {' | '.join(row)} |", flush=True)
    print()


def ratio(question: str, peer: str, answer: str) -> None:
    """Print a row for the page's table of all ratios."""
    print(f"{RATIO}{question} | {peer} | {answer}", flush=True)


def with_output(page: str, name: str, printed: str, stamp: str, folder: str = "benchmarks") -> str:
    """The page with what a program has printed in the program's place, and its ratios among the others.

    Tables are taken with the lines of text around them; where there is no table, all is shown as it was printed. A
    program that has printed nothing leaves the page as it is: it found nothing to measure here.

    Args:
        page: its text.
        name: the program's, without ``.py``.
        printed: what it has printed.
        stamp: when and where that was.
        folder: the program's.

    Raises:
        ValueError: the page has no such place, or two.
    """
    start = f"<!-- bench: {name} -->"
    if page.count(start) != 1 or END not in page.partition(start)[2]:
        raise ValueError(f"the page must have one place `{start} … {END}`, has {page.count(start)}")
    lines = printed.splitlines()
    ratios = [line.removeprefix(RATIO) for line in lines if line.startswith(RATIO)]
    body = "\n".join(line.rstrip() for line in lines if not line.startswith(RATIO)).strip()
    if not body:
        return page
    if not re.search(r"^\|[-| :]+\|$", body, re.MULTILINE):
        body = f"```text\n{body}\n```"
    before, _, rest = page.partition(start)
    body = re.sub(r"\n{3,}", "\n\n", body)
    page = f"{before}{start}\n{body}\n\n`python {folder}/{name}.py`, {stamp}.\n{rest[rest.index(END) :]}"
    return with_ratios(page, name, ratios) if ratios else page


def with_ratios(page: str, name: str, ratios: Sequence[str]) -> str:
    """The page whose table of ratios has these rows in the place of the program's; new ones come last."""
    found = re.search(r"^\| question \|.*\n\|[-|]+\n((?:\|.*\n)+)", page, re.MULTILINE)
    if found is None:
        raise ValueError("the page has no table `| question | program | peer | ratio |`")
    rows = found[1].splitlines()
    own = [index for index, row in enumerate(rows) if row.split("|")[2].strip() == f"`{name}.py`"]
    place = own[0] if own else len(rows)
    kept = [row for index, row in enumerate(rows) if index not in own]
    new = []
    for line in ratios:
        question, peer, answer = line.split(" | ")
        new.append(f"| {question} | `{name}.py` | {peer} | {answer} |")
    rows = [*kept[:place], *new, *kept[place:]]
    return page[: found.start(1)] + "\n".join(rows) + "\n" + page[found.end(1) :]


def stamp() -> str:
    """Today, the machine, what it does now beside, and the versions of what is installed."""
    installed = []
    for peer in PEERS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed.append(f"{peer} {importlib.metadata.version(peer)}")
    today, load = datetime.datetime.now(datetime.UTC).date(), f"load {os.getloadavg()[0]:.1f}"
    return ", ".join([f"{today}", machine(), *installed, load])
