"""A loss with attention → one that has a second derivative, or an error in backward that says how to get one.

``F.scaled_dot_product_attention`` takes a fast kernel where it can, and these kernels have no second derivative. Its
formula, ``SDPBackend.MATH``, has all of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.backends import cuda

from torchopt_dist.typing import OptionalTensor

__all__ = ["attention_by_formula", "explain", "is_attention"]

# Torch's own context, `sdpa_kernel`, must be left by the thread that has entered it (2.15).
_SETTINGS: tuple[tuple[Callable[[], bool], Callable[[bool], None]], ...] = (
    (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
)
"""Torch's, on every device: what says whether a way is allowed, and what allows it."""
_FORMULA = (True, False, False, False)
_KERNELS = "ScaledDotProduct"
"""What the names of the kernels' nodes begin with; the formula has none of its own."""


class _Choice:
    """The number of threads that compute attention by its formula; torch's setting holds for the whole process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count = 0
        self.before: list[bool] = []


_choice = _Choice()


@contextmanager
def attention_by_formula() -> Iterator[None]:
    """A context in which ``F.scaled_dot_product_attention`` computes by its formula.

    Meanwhile this holds for other threads, too. The first thread to enter changes torch's setting, and the last one to
    leave restores it.
    """
    with _choice.lock:
        if _choice.count == 0:
            _choice.before = [is_enabled() for is_enabled, _ in _SETTINGS]
            for (_, enable), wanted in zip(_SETTINGS, _FORMULA, strict=True):
                enable(wanted)
        _choice.count += 1
    try:
        yield
    finally:
        with _choice.lock:
            _choice.count -= 1
            if _choice.count == 0:
                for (_, enable), before in zip(_SETTINGS, _choice.before, strict=True):
                    enable(before)


def is_attention(kind: str) -> bool:
    """Whether a node's class of this name is that of a kernel of attention."""
    return kind.startswith(_KERNELS)


def explain(nodes: Iterable[Any]) -> None:
    """Let a backward through recorded gradients, of which attention's kernels are incapable, raise a clear error.

    Args:
        nodes: of the gradients of a loss with attention.
    """
    for node in nodes:
        if node.name().endswith("NotImplemented"):
            node.register_prehook(_refuse)


def _refuse(grad_outputs: tuple[OptionalTensor, ...]) -> None:
    raise RuntimeError(
        "the kernels of F.scaled_dot_product_attention have no second derivative: give the step a function, "
        "`optimizer.step(lambda: loss)`, which computes the attention by its formula; or compute the loss inside of "
        "`torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)`; or ask for no second order by "
        "`optimizer.step(loss, first_order=True)`"
    )
