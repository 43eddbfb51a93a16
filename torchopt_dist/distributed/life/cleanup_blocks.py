"""A thread's frame → whether it, or one of its callers, is in a ``finally`` block or leaves a ``with`` block.

Python does not report this where no exception is handled. The source does: the frame's line lies in such a block or
not.
"""

from __future__ import annotations

import ast
import functools
import linecache
from types import FrameType

__all__ = ["is_cleaning_up"]

_EXITS = frozenset({"__exit__", "__aexit__", "__del__"})


def is_cleaning_up(frame: FrameType | None, until: FrameType | None) -> bool:
    """Whether a frame, or a caller of it before ``until``, is in such a block; ``False`` if there is no source."""
    while frame is not None and frame is not until:
        if frame.f_code.co_name in _EXITS or frame.f_lineno in _finally_lines(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return False


@functools.lru_cache(maxsize=256)
def _finally_lines(filename: str) -> frozenset[int]:
    """The lines of a file's ``finally`` blocks."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError, RecursionError):
        return frozenset()
    blocks = [node.finalbody for node in ast.walk(tree) if isinstance(node, (ast.Try, ast.TryStar))]
    return frozenset(
        line for block in blocks if block for line in range(block[0].lineno, (block[-1].end_lineno or 0) + 1)
    )
