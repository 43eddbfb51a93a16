"""Torch's fast path of attention, which has no derivative → the layers' own operations, inside transforms.

In ``eval()``, ``nn.MultiheadAttention`` and ``nn.TransformerEncoderLayer`` call one function of torch for all that they
compute, unless a tensor requires grad; inside ``vmap`` they cannot see that one does (2.13).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from torch.backends import mha

from torchopt_dist._functional import replaced
from torchopt_dist._torch_private import transforms_are_active

__all__ = ["without_fast_path"]


def without_fast_path() -> AbstractContextManager[None]:
    """A context in which this thread's layers do not take the fast path inside of transforms."""
    return replaced(mha, {"get_fastpath_enabled": _is_enabled})


def _is_enabled(torchs: Callable[[], bool]) -> bool:
    return not transforms_are_active() and torchs()
