"""A dotted name → what torch has there."""

from __future__ import annotations

from typing import Any

import torch


def find(path: str) -> Any:
    """The attribute of ``torch`` at a dotted path; ``None`` where a part of the path is missing."""
    found: Any = torch
    for name in path.split("."):
        found = getattr(found, name, None)
    return found
