"""Attention → attention with all derivatives, or an error in backward that says how to get them.

``F.scaled_dot_product_attention`` takes a fast kernel where it can, and these kernels have no second derivative. Its
formula, ``SDPBackend.MATH``, has all of them; where it has many scores, it is computed in tiles. In ``eval()``,
``nn.MultiheadAttention`` and ``nn.TransformerEncoderLayer`` call one function of torch, the fast path, for all that
they compute, unless a tensor requires grad; inside ``vmap`` they cannot see that one does (2.13).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends import cuda, mha

from torchopt_dist._formulas.operands import Attention, fit_short_formula
from torchopt_dist._formulas.tiled_attention import tiled_attention
from torchopt_dist._functional import Replacements, replaced
from torchopt_dist._torch_private import entrances_for_tensors, recomputing_checkpoint, transforms_are_active
from torchopt_dist._types import OptionalTensor
from torchopt_dist._vjp import plus

__all__ = ["attention_by_formula", "short_attention", "without_fast_path"]

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


def short_attention(torchs: Callable[..., Tensor], *args: Any, **named: Any) -> Tensor:
    """As one node of a graph, where the tensors are plain."""
    given = Attention(*args, **named)
    query, key, value, mask, dropout_p, is_causal, _, enable_gqa = given
    mask_fits = mask is None or (not mask.requires_grad and mask.layout == torch.strided)
    alike = query.shape[:-2] == key.shape[:-2] == value.shape[:-2]
    is_plain = not (dropout_p or enable_gqa or is_causal) and mask_fits and alike
    if not is_plain or not fit_short_formula(query, key, value):
        return given.by(torchs)
    attended, _weights = _Attention.apply(query, key, value, mask, given.factor)
    return attended


def _through_softmax(weights: Tensor, x: Tensor) -> Tensor:
    """A tangent or a gradient of a softmax, times its derivative, which is symmetric."""
    weighted = weights * x
    return weighted - weights * weighted.sum(-1, keepdim=True)


class _Attention(torch.autograd.Function):
    """Softmax of the scores, times the values; and the softmax."""

    apply: ClassVar[Any]

    @staticmethod
    def forward(
        query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, factor: float
    ) -> tuple[Tensor, Tensor]:
        scores = (query * factor) @ key.transpose(-2, -1)
        if mask is None:
            weights = scores.softmax(-1)
        else:
            scores = scores + mask if mask.is_floating_point() else scores.masked_fill(~mask, -math.inf)
            # As in torch, what may attend to nothing gets zeros.
            weights = scores.softmax(-1).masked_fill(scores.amax(-1, keepdim=True).isneginf(), 0)
        return weights @ value, weights

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        query, key, value, _mask, ctx.factor = inputs
        ctx.save_for_backward(query, key, value, output[1])
        ctx.save_for_forward(query, key, value, output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(
        ctx: Any, of_attended: OptionalTensor, of_weights: OptionalTensor
    ) -> tuple[OptionalTensor, ...]:
        query, key, value, weights = ctx.saved_tensors
        of_value = None
        if of_attended is not None:
            of_value = weights.transpose(-2, -1) @ of_attended
            of_weights = plus(of_weights, of_attended @ value.transpose(-2, -1))
        if of_weights is None:
            return None, None, of_value, None, None
        of_scores = _through_softmax(weights, of_weights) * ctx.factor
        return of_scores @ key, of_scores.transpose(-2, -1) @ query, of_value, None, None

    @staticmethod
    def jvp(
        ctx: Any, query_dot: OptionalTensor, key_dot: OptionalTensor, value_dot: OptionalTensor, *_: None
    ) -> tuple[OptionalTensor, OptionalTensor]:
        query, key, value, weights = ctx.saved_tensors
        scores_dot = None if query_dot is None else query_dot @ key.transpose(-2, -1)
        if key_dot is not None:
            scores_dot = plus(scores_dot, query @ key_dot.transpose(-2, -1))
        attended_dot = None if value_dot is None else weights @ value_dot
        if scores_dot is None:
            return attended_dot, torch.zeros_like(weights)
        weights_dot = _through_softmax(weights, scores_dot * ctx.factor)
        return plus(attended_dot, weights_dot @ value), weights_dot
