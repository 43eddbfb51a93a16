"""Where the proof runs: on the GPU if there is one, else on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchopt_dist import pytree

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
needs_gpu = pytest.mark.skipif(not GPU, reason="needs a GPU")


def on_device(value: Any, dtype: torch.dtype | None = None) -> Any:
    """Copies of a tree's tensors and modules on the device, floating ones in a dtype; leaves require grad as before."""

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, nn.Module):
            return copy.deepcopy(leaf).to(DEVICE, dtype)
        if not isinstance(leaf, Tensor):
            return leaf
        kind = dtype if leaf.is_floating_point() else None
        return leaf.detach().to(DEVICE, kind, copy=True).requires_grad_(leaf.requires_grad)

    leaves, spec = pytree.flatten(value)
    return pytree.unflatten(spec, [moved(leaf) for leaf in leaves])


def peak(function: Callable[[], object]) -> float:
    """MiB of the GPU above what there was before, at most at a time."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def assert_near(found: Any, expected: Any, tolerance: float) -> None:
    """Each tensor on the CPU and in float64 → the norm of the difference is small beside the norm of all."""
    one, other = (
        torch.cat([x.detach().cpu().double().reshape(-1) for x in flat]) for flat in (found, expected)
    )
    size = other.norm().item()
    assert torch.isfinite(one).all()
    assert (one - other).norm().item() <= tolerance * max(size, 1e-30), (
        f"{(one - other).norm().item() / size:.1e}"
    )
