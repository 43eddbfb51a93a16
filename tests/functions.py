"""What tests of several folders send to workers, who import it from here."""

from __future__ import annotations

import os


class MyError(Exception):
    """An exception that takes an argument by name, which no plain pickle of exceptions can do."""

    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


def my_rank() -> int:
    """The rank of the process that runs this, in a world of any kind."""
    return int(os.environ["RANK"])


def spin() -> None:
    """Compute in Python without end."""
    while True:
        pass
