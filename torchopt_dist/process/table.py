"""Rows of texts → a table of aligned columns; seconds and bytes → texts that a person reads."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["bytes_text", "seconds_text", "table"]


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A line for the header and one a row, which may be shorter; the first ``left`` columns are left-aligned."""
    lines = [[*row, *[""] * (len(header) - len(row))] for row in [header, *rows]]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if place < left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def seconds_text(seconds: float) -> str:
    """Such as ``12.3 ms`` or ``1.23 s``."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def bytes_text(count: float) -> str:
    """Such as ``12 B`` or ``1.2 MB``."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
