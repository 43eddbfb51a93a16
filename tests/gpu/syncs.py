"""A function → how often the host waits for the GPU while it runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch


def waits(function: Callable[[], object]) -> int:
    """What torch's debug mode reports, copies to and from the GPU among them."""
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            function()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(one.message) for one in told)
