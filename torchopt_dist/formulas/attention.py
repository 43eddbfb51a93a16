"""Attention → attention by its formula, with all derivatives, or an error in backward that says how to get them.

``F.scaled_dot_product_attention`` takes a fast kernel where it can, and these kernels have no second derivative. Its
formula, ``SDPBackend.MATH``, has all of them; where it has many scores, it is computed in tiles. In ``eval()``,
``nn.MultiheadAttention`` and ``nn.TransformerEncoderLayer`` call one function of torch, the fast path, for all that
they compute, unless a tensor requires grad; inside ``vmap`` they cannot see that one does (2.13).

The scores of all queries and keys, and what their derivatives make of them, are the memory of attention. Where each
tile of rows is a node that keeps its queries, the keys and the values only, no more than one tile's scores are there at
a time, for derivatives of every order. For first derivatives this is what the kernels do (Rabe and Staats,
"Self-attention does not need O(n²) memory", 2021); they have no second ones.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends import cuda, mha

from torchopt_dist.core.functional import Replacements, replaced
from torchopt_dist.core.random_turns import draw_seed
from torchopt_dist.core.remat import PureFn, apply
from torchopt_dist.core.types import OptionalTensor
from torchopt_dist.core.uncompiled import is_traced
from torchopt_dist.torch_private import (
    entrances_for_tensors,
    recomputing_checkpoint,
    transforms_are_active,
)

__all__ = ["LONG", "ROWS", "Attention", "attention_by_formula", "tiled_attention", "without_fast_path"]


LONG = 2**21
"""From so many scores on, attention is computed in tiles."""
TILE = 2**20
"""So many scores a tile has, unless these are fewer rows than :data:`ROWS`."""
ROWS = 32
"""The fewest rows of a tile."""
ON_ACCELERATORS = 16
"""How many times as many scores that is on a GPU, which starts no faster and then computes faster."""


class Attention(NamedTuple):
    """What ``F.scaled_dot_product_attention`` is given."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: OptionalTensor = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def factor(self) -> float:
        """Of the scores."""
        return 1 / math.sqrt(self.query.shape[-1]) if self.scale is None else self.scale

    def by(self, torchs: Callable[..., Tensor]) -> Tensor:
        """What torch's function returns."""
        *rest, scale, enable_gqa = self
        return torchs(*rest, scale=scale, enable_gqa=enable_gqa)


def tiled_attention(torchs: Callable[..., Tensor], *args: Any, **named: Any) -> Tensor:
    """As ``F.scaled_dot_product_attention``, in the place of which it stands while gradients are recorded.

    With dropout, other numbers are drawn than torch draws: each tile has a seed, from one that is drawn from the
    default generator.
    """
    attention = Attention(*args, **named)
    rows = 0
    if torch.is_grad_enabled() and not is_traced():
        rows = _rows_of_a_tile(attention)
    if not rows:
        return attention.by(torchs)
    query, key, value, attn_mask, dropout_p, is_causal, *_ = attention
    device = query.device.type
    if torch.is_autocast_enabled(device) and query.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    seed = draw_seed() if dropout_p else 0
    masks: Sequence[Tensor | None] = [attn_mask]
    tiles = query.split(rows, -2)
    if attn_mask is None or attn_mask.dim() < 2 or attn_mask.shape[-2] == 1:
        masks = [attn_mask] * len(tiles)
    else:
        masks = attn_mask.split(rows, -2)
    made = []
    for number, (tile, mask) in enumerate(zip(tiles, masks, strict=True)):
        first = number * rows if is_causal else None
        function: PureFn = _Tile(first, attention.factor, dropout_p, seed + number)
        seen = min(key.shape[-2], number * rows + tile.shape[-2]) if is_causal else key.shape[-2]
        given = (
            [tile, key, value] if seen == key.shape[-2] else [tile, *(x[..., :seen, :] for x in (key, value))]
        )
        made.append(apply(function, *given, *([] if mask is None else [mask]))[0])
    return torch.cat(made, -2)


def _rows_of_a_tile(attention: Attention) -> int:
    """How many rows of queries a tile has; 0 where the scores are few, or torch is to look at the arguments."""
    query, key, value, mask, _, is_causal, _, enable_gqa = attention
    tensors = [query, key, value] if mask is None else [query, key, value, mask]
    if any(
        type(x) not in (Tensor, torch.nn.Parameter) or x.layout != torch.strided or x.dim() < 2
        for x in tensors
    ):
        return 0
    if query.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        return 0
    if not query.dtype == key.dtype == value.dtype or (mask is not None and is_causal):
        return 0
    if query.shape[-1] != key.shape[-1] or key.shape[-2] != value.shape[-2]:
        return 0
    if enable_gqa and not _are_grouped(query, key, value):
        return 0
    heads = math.prod(query.shape[:-2] if enable_gqa else _batch(query, key, value))
    count, width = query.shape[-2], key.shape[-2]
    times = 1 if query.is_cpu else ON_ACCELERATORS
    if heads * count * width < LONG * times:
        return 0
    rows = max(ROWS, TILE * times // (heads * width))
    return rows if rows < count else 0


def _batch(*tensors: Tensor) -> torch.Size:
    return torch.broadcast_shapes(*[x.shape[:-2] for x in tensors])


def _are_grouped(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether each of the heads of keys and values is that of some heads of queries."""
    heads = [x.shape[-3] if x.dim() > 2 else 0 for x in (query, key, value)]
    return all(heads) and heads[0] % heads[1] == 0 == heads[0] % heads[2]


@dataclass(frozen=True)
class _Tile:
    """Some rows of queries, all keys and values that they see, perhaps a mask → the attention of these rows."""

    first: int | None
    """The number of the first row, if each sees no keys of higher numbers."""
    factor: float
    dropout_p: float
    seed: int

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor]:
        with torch.autocast(query.device.type, enabled=False):
            return (self._attended(query, key, value, mask).to(query.dtype),)

    def _attended(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        if query.dtype in (torch.bfloat16, torch.float16):
            query, key, value = query.float(), key.float(), value.float()
        if query.dim() > 2:
            key, value = (
                x.repeat_interleave(query.shape[-3] // x.shape[-3], -3)
                if x.dim() > 2 and x.shape[-3] not in (1, query.shape[-3]) and query.shape[-3] != 1
                else x
                for x in (key, value)
            )
        scores = (query * self.factor) @ key.transpose(-2, -1)
        if self.first is not None:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(self.first + 1)
            weights = scores.masked_fill(later, -math.inf).softmax(-1)
        elif mask is None:
            weights = scores.softmax(-1)
        else:
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
            # As in torch, what may attend to nothing gets zeros; the softmax of these rows has a gradient, though.
            nothing = scores.detach().amax(-1, keepdim=True).isneginf()
            weights = scores.masked_fill(nothing, 0).softmax(-1).masked_fill(nothing, 0)
        if self.dropout_p:
            generator = torch.Generator(weights.device).manual_seed(self.seed)
            kept = torch.rand(weights.shape, generator=generator, device=weights.device) >= self.dropout_p
            weights = weights * kept / (1 - self.dropout_p if self.dropout_p < 1 else 1)
        return weights @ value


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
