"""Attention → attention with all derivatives, or an error in backward that says how to get them.

``F.scaled_dot_product_attention`` takes a fast kernel where it can, and these kernels have no second derivative. Its
formula, ``SDPBackend.MATH``, has all of them; where it has many scores, it is computed in tiles. In ``eval()``,
``nn.MultiheadAttention`` and ``nn.TransformerEncoderLayer`` call one function of torch, the fast path, for all that
they compute, unless a tensor requires grad; inside ``vmap`` they cannot see that one does (2.13).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch.nn.functional as F
from torch.backends import cuda, mha

from torchopt_dist.core.functional import Replacements, replaced
from torchopt_dist.formulas.tiled_attention import tiled_attention
from torchopt_dist.torch_private import entrances_for_tensors, recomputing_checkpoint, transforms_are_active

__all__ = ["attention_by_formula", "without_fast_path"]

# Torch's own context, `sdpa_kernel`, must be left by the thread that has entered it (2.15).
_SETTINGS: tuple[tuple[Callable[[], bool], Callable[[bool], None]], ...] = (
    (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
)
"""Torch's, on every device: what says whether a way is allowed, and what allows it."""
_FORMULA = (True, False, False, False)


class _Choice:
    """The number of threads that compute attention by its formula; torch's setting holds for the whole process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count = 0
        self.before: list[bool] = []


_choice = _Choice()


@contextmanager
def attention_by_formula() -> Iterator[None]:
    """A context in which ``F.scaled_dot_product_attention`` computes by its formula, which has all derivatives.

    In this thread long ones are computed in tiles, and ``torch.utils.checkpoint`` computes again what it has computed
    here, in whichever context the backward pass is.
    """
    with _without_kernels(), replaced(F, {"scaled_dot_product_attention": tiled_attention}):
        checkpoint = recomputing_checkpoint()
        with nullcontext() if checkpoint is None else replaced(checkpoint[0], {checkpoint[1]: _checkpoint}):
            yield


def _checkpoint(torchs: Callable[..., Any], function: Callable[..., Any], *rest: Any, **named: Any) -> Any:
    """A checkpoint's function is called again with the same functions in the places of torch's."""
    here = Replacements(entrances_for_tensors())

    def again(*args: Any, **kwargs: Any) -> Any:
        with _without_kernels(), here.again():
            return function(*args, **kwargs)

    return torchs(again, *rest, **named)


@contextmanager
def _without_kernels() -> Iterator[None]:
    """A context in which torch computes attention by its formula.

    Meanwhile this holds for other threads, too. The first thread to enter changes torch's setting, and the last one to
    leave restores it.
    """
    with _choice.lock:
        if _choice.count == 0:
            _choice.before = [is_enabled() for is_enabled, _ in _SETTINGS]
            _set(_FORMULA)
        _choice.count += 1
    try:
        yield
    finally:
        with _choice.lock:
            _choice.count -= 1
            if _choice.count == 0:
                _set(_choice.before)


def _set(wanted: Sequence[bool]) -> None:
    for (is_enabled, enable), want in zip(_SETTINGS, wanted, strict=True):
        if is_enabled() != want:
            enable(want)


def without_fast_path() -> AbstractContextManager[None]:
    """A context in which this thread's layers do not take the fast path inside of transforms."""
    return replaced(mha, {"get_fastpath_enabled": _is_enabled})


def _is_enabled(torchs: Callable[[], bool]) -> bool:
    return not transforms_are_active() and torchs()
