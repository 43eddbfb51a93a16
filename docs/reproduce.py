"""``python docs/reproduce.py [NAME…]`` → the tables, minutes and pictures of ``docs/reproductions.md``.

That is ``make reproduce``. Every program that has a place ``<!-- bench: NAME -->`` on the page, or those named, runs on
one worker and on two. The tables that it prints on one worker come into its place, and below them how long it took and
how far the numbers of two workers are from those of one. A program that fails leaves its place as it was.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path += [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1] / "benchmarks")]
import pages
from page import stamp, with_output

PAGE = pages.DOCS / "reproductions.md"
ALIKE = 0.02
"""How far a number of two workers may be from that of one, as a part of it; or by one in its last digit."""
MEASURED = re.compile(r"\b(ms|seconds?|minutes?|[KMG]i?B|memory|time|times)\b")
"""In the heading of a column whose numbers differ from run to run, or in such a cell itself."""
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")


def programs(page: str) -> list[str]:
    """The programs that have a place on the page, in its order."""
    return re.findall(r"^<!-- bench: (\w+) -->$", page, re.MULTILINE)


def tables(printed: str) -> str:
    """The tables among what a program has printed, with an empty line between two."""
    lines = [line if line.startswith("|") else "" for line in printed.splitlines()]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n")


def difference(one: str, two: str) -> float:
    """By what part of itself a number of ``one`` differs from that of ``two`` at most, but for what was measured.

    Args:
        one: tables.
        two: the same tables of another run. A difference of one in the last digit shown counts as none.

    Returns:
        The part; infinity if the tables differ in more than numbers.
    """
    if NUMBER.sub("0", one) != NUMBER.sub("0", two):
        return float("inf")
    worst, heading = 0.0, [""]
    for line, other in zip(one.splitlines(), two.splitlines(), strict=True):
        cells, others = line.split("|"), other.split("|")
        if not heading[1:]:
            heading = cells
        elif not line:
            heading = [""]
        for title, cell, its in zip(heading, cells, others, strict=len(heading) > 1):
            if MEASURED.search(title) or MEASURED.search(cell):
                continue
            for a, b in zip(NUMBER.findall(cell), NUMBER.findall(its), strict=True):
                x, y = (float(number.replace(",", "")) for number in (a, b))
                if abs(x - y) > 1.001 * last_digit(a):
                    worst = max(worst, abs(x - y) / max(abs(x), abs(y)))
    return worst


def last_digit(number: str) -> float:
    """What one in the last digit of a number is: 0.01 for ``-1.98``."""
    mantissa, _, exponent = number.partition("e")
    return float(10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2])))


def reproduce(name: str) -> str | None:
    """Run a program in all ways, and write its place; returns what is wrong, if anything is."""
    before = stamp()
    runs = pages.run_example(pages.ROOT / "examples" / f"{name}.py")
    if runs is None:
        return "failed"
    if pages.SPREAD not in runs:
        return "does not say that it runs by torchrun"
    shown = {where: tables(run.printed) for where, run in runs.items()}
    if not shown[pages.ALONE]:
        return "printed no table"
    apart = difference(*shown.values())
    alike = "there the same numbers" if apart == 0 else f"there numbers up to {100 * apart:.2g} % from these"
    minutes = [f"{run.seconds / 60:.1f}" for run in runs.values()]
    took = f"{minutes[0]} minutes on one worker and {minutes[1]} on two, {alike}; {before}"
    text = with_output(PAGE.read_text("utf-8"), name, shown[pages.ALONE], took, folder="examples")
    PAGE.write_text(text, "utf-8")
    return f"other numbers on two workers, by up to {100 * apart:.2g} %" if apart > ALIKE else None


def main(names: list[str]) -> str | None:
    """Reproduce all, or those named; returns which did not come out, if any."""
    known = programs(PAGE.read_text("utf-8"))
    if unknown := [name for name in names if name not in known]:
        return f"NAME must be one of {', '.join(known)}, got {', '.join(unknown)}"
    wrong = {name: reproduce(name) for name in known if not names or name in names}
    return "\n".join(f"{name}: {what}" for name, what in wrong.items() if what) or None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
