"""Names of the API pages → the check of what their line says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Check = Callable[[], None]
CHECKS: dict[str, dict[str, Check]] = {}
"""Page → name in its tables → check."""


def promises(page: str, *names: str) -> Callable[[Check], Check]:
    """Declare that a function checks the lines of some names of a page."""

    def declare(check: Check) -> Check:
        for name in names:
            assert name not in CHECKS.setdefault(page, {}), name
            CHECKS[page][name] = check
        return check

    return declare


def same(result: Any, expected: Any, **tolerances: float) -> None:
    """Compare tensors, numbers or trees of them, in float64."""
    torch.testing.assert_close(
        result, expected, check_dtype=False, **(tolerances or {"rtol": 1e-9, "atol": 1e-9})
    )


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)
