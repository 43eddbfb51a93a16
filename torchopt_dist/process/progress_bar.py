"""A title, a total → a bar on a terminal or in a notebook; for the steps of a loop lines of a log elsewhere."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from torchopt_dist.core.vmap import visible

__all__ = ["StepsBar", "both", "tasks_or_steps"]

SHOW_SECONDS = 0.2
"""How often a bar is drawn anew."""
LOG_SECONDS = 10.0
"""How often a line is logged where there is no bar."""

log = logging.getLogger(__name__)


def tasks_or_steps(title: str, total: int, unit: str) -> Any:
    """A bar of tqdm, on a terminal or in a notebook's cell: not in a file or a pipe, as of a worker of ``launch``.

    Raises:
        ImportError: tqdm is not installed.
    """
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise ImportError("progress=True needs tqdm: pip install tqdm; or leave it out") from error
    # A cell's stream says that it is no terminal, and shows a bar nevertheless.
    is_cell = type(sys.stderr).__module__.partition(".")[0] == "ipykernel"
    return tqdm(total=total, desc=title, unit=unit, leave=False, disable=False if is_cell else None)


class StepsBar:
    """Is told of each step of a loop, and shows how many there were, the last loss, and the seconds that are left.

    In a file, a pipe and on other ranks than 0, records of ``logging`` at level INFO say the same from time to time.
    """

    def __init__(self, title: str, total: int) -> None:
        self._title, self._total = title, total
        self._bar = tasks_or_steps(title, total, "step")
        self._logs = bool(self._bar.disable) or os.environ.get("RANK", "0") != "0"
        if self._logs:
            self._bar.close()
        self._begun = self._shown = time.monotonic()

    def __call__(self, number: int, loss: Tensor) -> None:
        """Step ``number`` has ended with this loss."""
        now, done = time.monotonic(), number + 1
        if done < self._total and now - self._shown < (LOG_SECONDS if self._logs else SHOW_SECONDS):
            return  # the loss is not read: on a GPU that would wait for the step
        seen = visible(loss)
        said = "" if seen is None else f"loss {seen.float().mean().item():.4g}"
        if self._logs:
            left = (now - self._begun) / done * (self._total - done)
            parts = [f"step {done} of {self._total}", *([said] if said else []), f"{left:.0f} s left"]
            log.info("%s: %s", self._title, ", ".join(parts))
        else:
            self._bar.set_postfix_str(said, refresh=False)
            self._bar.n = done
            self._bar.refresh()
        self._shown = now

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()


def both(*tellers: Callable[[int, Tensor], Any] | None) -> Callable[[int, Tensor], None] | None:
    """A function that tells all of these of a step; ``None``, if there is none."""
    told = [teller for teller in tellers if teller is not None]
    if not told:
        return None

    def tell(number: int, loss: Tensor) -> None:
        for teller in told:
            teller(number, loss)

    return tell
