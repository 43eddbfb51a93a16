"""Operations at special points in recorded steps → second derivatives are those of differences or of another formula.

A row is an operation at a point: zeros, ties, one element, none at all, a mask that has a gradient. Where the operation
is smooth, the expected derivative is a difference of the first ones. Where torch's first one is a convention, a
function of elementary operations says which: the same function near the point, on one side of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import torchopt_dist as todist
from tests.rows import each_row
from torchopt_dist.formulas import attention
from torchopt_dist.formulas.attention import attention_by_formula

D = torch.float64
F: Any = nn.functional
INF = math.inf


class Row(NamedTuple):
    function: Callable[..., Any]
    points: Sequence[Any]
    """Numbers and lists of numbers, of which each is a tensor that has a gradient."""
    formula: Callable[..., Any] | None = None
    """What has the same derivatives; by default they are those of differences."""


def tied_mean(x: Tensor) -> Tensor:
    """What has the largest value shares its gradient."""
    return x[x == x.detach().max()].mean()


def at_zero(slope: float, curvature: float = 0.0) -> Callable[[Tensor], Tensor]:
    return lambda x: slope * x + curvature * x**2 / 2


def attended(*args: Tensor, **options: Any) -> Tensor:
    q, k, v, mask = args
    weights = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]) + mask).exp()
    sums = weights.sum(-1, keepdim=True)
    return weights / sums.masked_fill(sums == 0, 1) @ v


def in_tiles(*args: Tensor) -> Tensor:
    with attention_by_formula():
        q, k, v, mask = args
        return F.scaled_dot_product_attention(q, k, v, mask)


QKV = [[[0.3, -1.0], [0.2, 0.4]], [[0.7, 0.1], [-0.4, 0.9], [0.3, 0.3]], [[1.0], [-0.5], [0.25]]]
SQUARE = [[2.0, 0.5], [0.5, 1.0]]
ROWS = [[0.5, -1.0, 2.0], [1.5, 0.25, -0.75]]
LABELS = torch.tensor([2, 0])

ZEROS: dict[str, Row] = {
    "prod, a zero": Row(torch.prod, [[2.0, 0.0, 3.0]]),
    "prod, two zeros": Row(torch.prod, [[2.0, 0.0, 3.0, 0.0]]),
    "prod, three zeros": Row(torch.prod, [[0.0, 0.0, 0.0, 2.0]]),
    "prod of rows": Row(partial(torch.prod, dim=1), [[[2.0, 0.0, 3.0], [0.0, 0.0, 4.0], [1.0, 2.0, 3.0]]]),
    "cumprod, a zero": Row(partial(torch.cumprod, dim=0), [[2.0, 0.0, 3.0]]),
    "cumprod, two zeros": Row(partial(torch.cumprod, dim=0), [[2.0, 0.0, 3.0, 0.0]]),
    "vander": Row(torch.linalg.vander, [[0.0, 2.0]]),
    "sinc": Row(torch.sinc, [[0.0, 1.0, 0.3]]),
    "sinc, near zero": Row(
        torch.sinc,
        [[1e-9, -1e-6, 1e-3, 0.2]],
        lambda x: (
            1
            - (math.pi * x) ** 2 / 6
            + (math.pi * x) ** 4 / 120
            - (math.pi * x) ** 6 / 5040
            + (math.pi * x) ** 8 / 362880
        ),
    ),
    "pow, exponents 0": Row(torch.pow, [[2.0, 0.5], [0.0, 0.0]]),
    "pow, exponent 1": Row(torch.pow, [[2.0, 0.5], [1.0, 1.0]]),
    "pow of 0": Row(lambda x, y: x.abs() ** y, [[0.0, 2.0], [3.5, 2.5]]),
    "pow of 0, constant exponents": Row(
        lambda x: x ** torch.tensor([0, 1, 2, 3]),
        [[0.0] * 4],
        lambda x: torch.stack([0 * x[0], x[1], x[2] ** 2, x[3] ** 3]),
    ),
    "pow of negative numbers": Row(
        lambda x: x ** torch.tensor([0, 1, 2, 3]),
        [[-2.0] * 4],
        lambda x: torch.stack([0 * x[0] + 1, x[1], x[2] * x[2], x[3] * x[3] * x[3]]),
    ),
    "pow broadcast": Row(torch.pow, [[[2.0], [0.5]], [0.0, 1.0, 2.0]]),
    "pow, numbers": Row(lambda x: x**2 + x**1 + x**0 + x**3, [[0.0, 1.0]]),
    "pow of a number": Row(lambda x: 2**x, [[0.0, 1.0]]),
    "float_power": Row(torch.float_power, [[2.0, 0.5], [0.0, 0.0]]),
    "xlogy": Row(torch.xlogy, [[0.0, 1.0], [0.5, 2.0]]),
    "xlog1py": Row(torch.special.xlog1py, [[0.0, 1.0], [0.5, 0.0]]),
    "copysign": Row(
        lambda x, y: torch.copysign(x, y),
        [[0.0, 2.0], [1.0, -1.0]],
        lambda x, y: torch.stack([0 * x[0], -x[1]]),
    ),
    "copysign, a number": Row(
        lambda x: torch.copysign(x, -1.0), [[0.0, 2.0]], lambda x: x * torch.tensor([0, -1])
    ),
    "pow of a constant 0": Row(lambda y: torch.zeros(2, dtype=D) ** y, [[0.5, 2.0]], lambda y: 0 * y),
    "abs": Row(torch.abs, [[0.0, 1.0]], lambda x: torch.stack([0 * x[0], x[1]])),
    "sgn": Row(torch.sgn, [[0.0, 1.0]], lambda x: torch.sign(x.detach()) + 0 * x),
    "atan2": Row(
        torch.atan2,
        [[0.0, 0.0], [1.0, -1.0]],
        lambda x, y: torch.stack([(x[0] / y[0]).atan(), math.pi + (x[1] / y[1]).atan()]),
    ),
    "hypot": Row(torch.hypot, [[0.0, 3.0], [2.0, 0.0]]),
    "log1p, expm1, asinh, erf": Row(lambda x: x.log1p() + x.expm1() + x.asinh() + x.erf(), [[0.0]]),
    "lerp": Row(torch.lerp, [[1.0, 2.0], [1.0, 5.0], [0.0, 0.5]]),
    "logit, with eps": Row(partial(torch.logit, eps=0.1), [[0.0, 1.0, 0.3, 1.5]]),
    "cross": Row(torch.linalg.cross, [[0.0, 0.0, 0.0], [1.0, 2.0, 0.0]]),
    "trapezoid": Row(torch.trapezoid, [[0.0, 1.0, 2.0], [0.0, 0.0, 1.0]]),
    "addcdiv": Row(torch.addcdiv, [[1.0], [0.0], [2.0]]),
    "renorm": Row(lambda x: torch.renorm(x, 2, 0, 1.0), [[[0.0, 0.0], [3.0, 4.0], [0.1, 0.2]]]),
    "renorm of order 3": Row(lambda x: torch.renorm(x, 3, 1, 0.5), [[[0.0, 2.0], [0.0, 0.0]]]),
    "matrix_exp": Row(torch.linalg.matrix_exp, [[[0.0, 0.0], [0.0, 0.0]]]),
    "matrix_power of a singular matrix": Row(
        lambda x: torch.linalg.matrix_power(x, 3), [[[1.0, 2.0], [2.0, 4.0]]]
    ),
    "inv, slogdet of the identity": Row(
        lambda x: torch.linalg.inv(x) + torch.linalg.slogdet(x)[1], [[[1.0, 0.0], [0.0, 1.0]]]
    ),
    "solve for zeros": Row(torch.linalg.solve, [SQUARE, [0.0, 0.0]]),
    "cholesky of a diagonal": Row(lambda x: torch.linalg.cholesky(x + x.mT), [[[1.0, 0.0], [0.0, 2.0]]]),
}
"""Those of a smooth function."""

NORMS: dict[str, Row] = {
    # A norm's gradient at zero is zero, by convention, and so is its derivative.
    "norm": Row(torch.linalg.vector_norm, [[0.0, 0.0]], lambda x: 0 * x.sum()),
    "norm, tensors": Row(torch.norm, [[[0.0, 0.0]]], lambda x: 0 * x.sum()),
    "norm of rows": Row(
        partial(torch.linalg.vector_norm, dim=-1),
        [[[0.0, 0.0], [3.0, 4.0]]],
        lambda x: torch.stack([0 * x[0].sum(), (x[1] @ x[1]).sqrt()]),
    ),
    "norm of rows, kept": Row(
        partial(torch.linalg.vector_norm, dim=-1, keepdim=True),
        [[[0.0, 0.0], [3.0, 4.0]]],
        lambda x: torch.stack([0 * x[0].sum(), (x[1] @ x[1]).sqrt()])[:, None],
    ),
    "norm of order 3": Row(
        partial(torch.linalg.vector_norm, ord=3, dim=0),
        [[[0.0, 0.0], [0.0, 2.0]]],
        lambda x: torch.stack([0 * x[:, 0].sum(), x[1, 1] + 0 * x[0, 1]]),
    ),
    "norm of order 2.5, a zero": Row(
        partial(torch.linalg.vector_norm, ord=2.5),
        [[0.0, 2.0, -1.0]],
        lambda x: (x[1] ** 2.5 + (-x[2]) ** 2.5) ** 0.4 + 0 * x[0],
    ),
    "norm of order 1": Row(partial(torch.linalg.vector_norm, ord=1), [[0.0, 2.0]], lambda x: x[1] + 0 * x[0]),
    "norm of order inf, a tie": Row(partial(torch.linalg.vector_norm, ord=INF), [[2.0, 2.0, 1.0]], tied_mean),
    "matrix_norm": Row(torch.linalg.matrix_norm, [[[0.0, 0.0]]], lambda x: 0 * x.sum()),
    "norm of one element": Row(torch.linalg.vector_norm, [[-2.0]], lambda x: -x.sum()),
    "dist": Row(torch.dist, [[1.0, 2.0], [1.0, 2.0]], lambda x, y: 0 * (x + y).sum()),
    "dist of order 3": Row(
        partial(torch.dist, p=3), [[1.0, 2.0], [1.0, 2.0]], lambda x, y: 0 * (x + y).sum()
    ),
    "dist, broadcast": Row(torch.dist, [[[1.0, 2.0], [0.0, 2.0]], [1.0, 2.0]]),
    "pairwise_distance": Row(
        partial(F.pairwise_distance, eps=0.0),
        [[[1.0, 2.0], [0.0, 1.0]]] * 2,
        lambda x, y: 0 * (x + y).sum(-1),
    ),
    "normalize": Row(partial(F.normalize, eps=0.1), [[[0.0, 0.0], [3.0, 4.0]]]),
    "normalize, columns": Row(partial(F.normalize, eps=0.1, dim=0, p=3), [[[0.0, 3.0], [0.0, -1.0]]]),
    "cosine_similarity": Row(
        partial(F.cosine_similarity, eps=0.5),
        [[[0.0, 0.0], [1.0, 2.0]], [[2.0, 1.0], [0.0, 0.0]]],
        lambda x, y: 2 * (x * y).sum(-1) / torch.stack([(y[0] @ y[0]).sqrt(), (x[1] @ x[1]).sqrt()]),
    ),
    "cosine_similarity of equals": Row(F.cosine_similarity, [[[1.0, 2.0]], [[1.0, 2.0]]]),
    "masked normalize": Row(lambda x: torch.masked.normalize(x, 2.0, 1, eps=0.1), [[[0.0, 0.0], [3.0, 4.0]]]),
    # So it is with a deviation.
    "std of equals": Row(torch.std, [[1.0, 1.0, 1.0]], lambda x: 0 * x.sum()),
    "std of rows": Row(
        partial(torch.std, dim=1, correction=0, keepdim=True),
        [[[1.0, 1.0], [2.0, 5.0]]],
        lambda x: torch.stack([0 * x[0].sum(), (x[1, 1] - x[1, 0]) / 2])[:, None],
    ),
    "std_mean of rows": Row(
        lambda x: torch.stack(torch.std_mean(x, dim=-1)),
        [[[1.0, 1.0], [2.0, 5.0]]],
        lambda x: torch.stack(
            [torch.stack([0 * x[0].sum(), (x[1, 1] - x[1, 0]) / math.sqrt(2)]), x.mean(-1)]
        ),
    ),
    "var of equals": Row(torch.var, [[1.0, 1.0, 1.0]]),
}

SELECTED: dict[str, Row] = {
    # Ties: who is chosen, or how the gradient is shared, is a convention.
    "amax": Row(torch.amax, [[2.0, 1.0, 2.0]], tied_mean),
    "max": Row(torch.max, [[2.0, 1.0, 2.0]], tied_mean),
    "amin": Row(torch.amin, [[-2.0, 1.0, -2.0]], lambda x: -tied_mean(-x)),
    "aminmax": Row(lambda x: torch.aminmax(x)[1], [[2.0, 1.0, 2.0]], tied_mean),
    "max of rows": Row(lambda x: x.max(1).values, [[[2.0, 2.0, 1.0]]], lambda x: x[:, 0]),
    "max of rows, the chosen one": Row(
        lambda x: x.max(1).values, [ROWS], lambda x: x.gather(1, x.argmax(1)[:, None])[:, 0]
    ),
    "maximum": Row(
        torch.maximum, [[2.0, 1.0], [2.0, 3.0]], lambda x, y: torch.stack([(x[0] + y[0]) / 2, y[1]])
    ),
    "minimum": Row(
        torch.minimum, [[2.0, 1.0], [2.0, 3.0]], lambda x, y: torch.stack([(x[0] + y[0]) / 2, x[1]])
    ),
    "fmax": Row(torch.fmax, [[2.0, 1.0], [2.0, 3.0]], lambda x, y: torch.stack([x[0], y[1]])),
    "clamp": Row(
        lambda x: x.clamp(0, 1),
        [[0.0, 1.0, 0.5, 2.0]],
        lambda x: torch.stack([x[0], x[1], x[2], 0 * x[3] + 1]),
    ),
    "sort": Row(lambda x: torch.sort(x, stable=True).values, [[2.0, 1.0, 2.0]], lambda x: x[[1, 0, 2]]),
    "topk": Row(lambda x: torch.topk(x, 2).values.sum(), [[2.0, 1.0, 2.0]], lambda x: x[0] + x[2]),
    "cummax": Row(lambda x: torch.cummax(x, 0).values, [[2.0, 1.0, 2.0]], lambda x: x[[0, 0, 2]]),
    "max_pool1d": Row(lambda x: F.max_pool1d(x, 2), [[[1.0, 1.0, 0.0, 2.0]]], lambda x: x[:, [0, 3]]),
    "logsumexp of equals": Row(partial(torch.logsumexp, dim=0), [[2.0, 2.0]]),
    "softmax of equals": Row(partial(torch.softmax, dim=0), [[2.0, 2.0, 2.0]]),
    "eigvalsh, apart": Row(lambda x: torch.linalg.eigvalsh(x + x.mT), [[[1.0, 0.0], [0.0, 2.0]]]),
    "svdvals, apart": Row(torch.linalg.svdvals, [[[3.0, 0.0], [0.0, 2.0]]]),
    # Kinks: one side is chosen.
    "relu": Row(F.relu, [[0.0]], at_zero(0)),
    "relu6, hardtanh": Row(
        lambda x: F.relu6(x) + F.hardtanh(x),
        [[0.0, 6.0, 1.0]],
        lambda x: torch.stack([x[0], 0 * x[1] + 7, x[2] + 0 * x[2]]),
    ),
    "leaky_relu": Row(partial(F.leaky_relu, negative_slope=0.1), [[0.0]], at_zero(0.1)),
    "elu": Row(F.elu, [[0.0]], at_zero(1)),
    "celu": Row(F.celu, [[0.0]], at_zero(1)),
    "selu": Row(F.selu, [[0.0]], at_zero(1.7580993408473766)),
    "softshrink, hardshrink": Row(lambda x: F.softshrink(x) + F.hardshrink(x), [[0.5, 0.0]], at_zero(0)),
    "threshold": Row(lambda x: F.threshold(x, 0, 0), [[0.0]], at_zero(0)),
    "hardswish": Row(F.hardswish, [[0.0]], lambda x: x * (x / 6 + 0.5)),
    "gelu, silu, mish, softplus": Row(lambda x: F.gelu(x) + F.silu(x) + F.mish(x) + F.softplus(x), [[0.0]]),
    "softsign": Row(F.softsign, [[0.0]], at_zero(1)),
    "logsigmoid, tanhshrink": Row(lambda x: F.logsigmoid(x) + F.tanhshrink(x), [[0.0]]),
    "l1_loss": Row(F.l1_loss, [[1.0, 2.0], [1.0, 3.0]], lambda x, y: ((y - x)[1] + 0 * (x - y)[0]) / 2),
    "smooth_l1_loss": Row(
        F.smooth_l1_loss, [[1.0, 2.0], [1.0, 2.5]], lambda x, y: (x - y).square().mean() / 2
    ),
    "huber_loss": Row(
        partial(F.huber_loss, delta=0.5), [[1.0, 2.0], [1.0, 2.25]], lambda x, y: (x - y).square().mean() / 2
    ),
    "mse_loss": Row(F.mse_loss, [[1.0, 2.0], [1.0, 2.0]]),
    "hinge_embedding_loss": Row(
        lambda x: F.hinge_embedding_loss(x, torch.tensor([-1.0, 1.0])),
        [[1.0, 1.0]],
        lambda x: (1 - x[0] + x[1]) / 2,
    ),
    "margin_ranking_loss": Row(
        lambda x, y: F.margin_ranking_loss(x, y, torch.ones(2), margin=0.5), [[1.0, 2.0], [1.5, 2.0]]
    ),
    "triplet_margin_loss": Row(F.triplet_margin_loss, [[[1.0, 2.0]], [[1.0, 2.5]], [[1.0, 2.5]]]),
    "soft_margin_loss": Row(lambda x: F.soft_margin_loss(x, torch.tensor([-1.0, 1.0])), [[0.0, 0.0]]),
}

LOGS: dict[str, Row] = {
    # What is masked has the logarithm of zero.
    "logaddexp": Row(torch.logaddexp, [[1.0, 2.0, -INF], [-INF, 3.0, 1.0]]),
    "logaddexp2": Row(torch.logaddexp2, [[1.0, 2.0, -INF], [-INF, 3.0, 1.0]]),
    "masked logaddexp": Row(
        lambda x, y: torch.masked.logaddexp(
            x, y, input_mask=torch.tensor([True, False]), other_mask=torch.tensor([False, True])
        ),
        [[1.0, 2.0], [3.0, 4.0]],
    ),
    "logaddexp of equals": Row(torch.logaddexp, [[1.0, 2.0], [1.0, 500.0]]),
    "logsumexp, masked": Row(lambda x: masked(x, -INF).logsumexp(-1), [ROWS]),
    "logsumexp, all masked": Row(
        lambda x: x.masked_fill(x < 9, -INF).logsumexp(-1).exp(), [ROWS], lambda x: 0 * x.sum(-1)
    ),
    "logcumsumexp, masked": Row(lambda x: masked(x, -INF).logcumsumexp(-1).exp(), [ROWS]),
    "logcumsumexp, the last one": Row(lambda x: x.logcumsumexp(-1)[:, -1], [ROWS]),
    "softmax, masked": Row(lambda x: masked(x, -INF).softmax(-1), [ROWS]),
    "log_softmax, masked": Row(lambda x: masked(x, -INF).log_softmax(-1)[:, 2], [ROWS]),
    "cross_entropy, masked": Row(lambda x: F.cross_entropy(masked(x, -INF), torch.tensor([2, 2])), [ROWS]),
    "cross_entropy, ignored": Row(lambda x: F.cross_entropy(x, torch.tensor([-100, 1])), [ROWS]),
    "cross_entropy, all ignored": Row(
        lambda x: F.cross_entropy(x, torch.tensor([-100, -100]), reduction="sum"), [ROWS]
    ),
    "cross_entropy, smoothed": Row(partial(F.cross_entropy, target=LABELS, label_smoothing=0.1), [ROWS]),
    "kl_div": Row(lambda x: F.kl_div(x, torch.tensor([0.0, 1.0], dtype=D), reduction="sum"), [[-1.0, -2.0]]),
    "entr": Row(torch.special.entr, [[1.0, 0.5]]),
    "binary_cross_entropy_with_logits": Row(
        lambda x: F.binary_cross_entropy_with_logits(x, torch.tensor([0.0, 1.0], dtype=D)), [[0.0, 0.0]]
    ),
    "binary_cross_entropy": Row(
        F.binary_cross_entropy,
        [[0.25, 0.5], [0.0, 1.0]],
        lambda p, y: -(y * p.log() + (1 - y) * (1 - p).log()).mean(),
    ),
    "poisson_nll_loss": Row(lambda x: F.poisson_nll_loss(x, torch.tensor([0.0, 1.0], dtype=D)), [[0.0, 1.0]]),
    "gaussian_nll_loss": Row(F.gaussian_nll_loss, [[1.0, 2.0], [1.0, 2.0], [0.5, 1.5]]),
}


def masked(x: Tensor, value: float) -> Tensor:
    return x.masked_fill(torch.tensor([True, False, False]), value)


SIZES: dict[str, Row] = {
    "softmax of one": Row(partial(torch.softmax, dim=-1), [[[2.0], [3.0]]]),
    "log_softmax of one": Row(partial(torch.log_softmax, dim=-1), [[[2.0], [3.0]]]),
    "logsumexp of one": Row(partial(torch.logsumexp, dim=-1), [[[2.0], [3.0]]]),
    "prod of one": Row(torch.prod, [[0.0]]),
    "cumprod of one": Row(partial(torch.cumprod, dim=0), [[0.0]]),
    "var of one": Row(partial(torch.var, correction=0), [[2.0]]),
    "std of one": Row(partial(torch.std, correction=0), [[2.0]], at_zero(0)),
    "normalize of one": Row(F.normalize, [[[2.0], [-3.0]]], lambda x: x.detach().sign() + 0 * x),
    "layer_norm of one": Row(
        lambda x, w, b: F.layer_norm(x, (1,), w, b, eps=0.1), [[[2.0], [3.0]], [1.5], [0.5]]
    ),
    "group_norm of one": Row(
        lambda x, w, b: F.group_norm(x, 1, w, b, eps=0.1), [[[2.0, 2.0]], [1.5, 1.0], [0.5, 0.0]]
    ),
    "rms_norm of one": Row(lambda x, w: F.rms_norm(x, (1,), w, eps=0.1), [[[2.0], [0.0]], [1.5]]),
    "rms_norm of zeros": Row(lambda x, w: F.rms_norm(x, (2,), w, eps=0.1), [[[0.0, 0.0]], [1.5, 2.0]]),
    "layer_norm of equals": Row(
        lambda x, w: F.layer_norm(x, (3,), w, eps=0.1), [[[2.0] * 3], [1.5, 1.0, 0.5]]
    ),
    "batch_norm of equals": Row(
        lambda x, w: F.batch_norm(x, None, None, w, training=True, eps=0.1), [[[2.0, 1.0]] * 3, [1.5, 0.5]]
    ),
    "local_response_norm of zeros": Row(lambda x: F.local_response_norm(x, 2), [[[[0.0, 0.0], [0.0, 0.0]]]]),
    "matmul by one": Row(torch.matmul, [[[2.0]], [[3.0]]]),
    "conv1d of one": Row(F.conv1d, [[[[2.0]]], [[[3.0]]]]),
    "attention to one": Row(F.scaled_dot_product_attention, [[[0.3, -1.0]], [[0.7, 0.1]], [[1.0]]]),
    "logsumexp of a number": Row(lambda x: x.logsumexp(0), [2.0]),
    "logcumsumexp of a number": Row(lambda x: x.logcumsumexp(0), [2.0]),
    "softmax of a number": Row(lambda x: x.softmax(0), [2.0], lambda x: 0 * x + 1),
    "norm of a number": Row(lambda x: torch.linalg.vector_norm(x, dim=()), [0.0], at_zero(0)),
    "std of a number": Row(partial(torch.std, correction=0), [2.0], lambda x: 0 * x),
    "prod, cumprod of a number": Row(lambda x: x.prod() + x.cumprod(0), [0.0]),
    "pow, sinc of a number": Row(lambda x, y: x**y + x.sinc(), [2.0, 0.0]),
    "det of one": Row(torch.linalg.det, [[[2.0]]]),
}


def empty(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=D)


W, V = [[0.5, -1.0, 2.0], [1.0, 0.3, -0.7]], [0.5, 1.0, -0.25]
NONE: dict[str, Row] = {
    # An empty batch, in what has weights: no gradient is lost, and none is made up.
    "linear": Row(lambda w: F.linear(empty(0, 3), w), [W]),
    "bilinear": Row(lambda w: F.bilinear(empty(0, 2), empty(0, 3), w[None]), [W]),
    "matmul": Row(lambda w: empty(0, 2) @ w, [W]),
    "matmul over nothing": Row(lambda w: w[:, :0] @ empty(0, 4), [W]),
    "einsum": Row(lambda w: torch.einsum("bi,ij->bj", empty(0, 2), w), [W]),
    "conv1d": Row(lambda w: F.conv1d(empty(0, 1, 5), w[:, None]), [W]),
    "layer_norm": Row(lambda w: F.layer_norm(empty(0, 3), (3,), w), [V]),
    "rms_norm": Row(lambda w: F.rms_norm(empty(0, 3), (3,), w), [V]),
    "batch_norm in evaluation": Row(
        lambda w: F.batch_norm(empty(0, 3), torch.zeros(3, dtype=D), torch.ones(3, dtype=D), w), [V]
    ),
    "prelu": Row(lambda w: F.prelu(empty(0, 3), w), [V]),
    "embedding": Row(lambda w: F.embedding(torch.empty(0, dtype=torch.long), w), [W]),
    "embedding, padded": Row(lambda w: F.embedding(torch.empty(0, dtype=torch.long), w, padding_idx=0), [W]),
    "mse_loss, summed": Row(lambda w: F.mse_loss(w[:0], empty(0, 3), reduction="sum"), [W]),
    "cross_entropy, summed": Row(lambda w: F.cross_entropy(w[:0], LABELS[:0], reduction="sum"), [W]),
    "sum, prod, norm": Row(lambda w: w[:0].sum() + w[:0].prod() + torch.linalg.vector_norm(w[:0]), [W]),
    "rows of nothing": Row(lambda w: torch.linalg.vector_norm(w[:, :0], dim=-1) + w[:, :0].prod(-1), [W]),
    "softmax": Row(lambda w: w[:0].softmax(-1).sum() + w[:, :0].softmax(0).sum(), [W]),
    "logsumexp": Row(lambda w: w[:0].logsumexp(-1), [W]),
    "cumprod, cumsum": Row(lambda w: w[:0].cumprod(0) + w[:0].cumsum(1), [W]),
    "amax of rows": Row(lambda w: w[:0].amax(1), [W]),
    "sort": Row(lambda w: w[:0].sort(-1).values, [W]),
    "cat, stack": Row(lambda w: torch.cat([w, w[:0]]) + torch.stack([w[0], w[1]]), [W]),
    "index_select": Row(lambda w: w.index_select(0, torch.empty(0, dtype=torch.long)), [W]),
    "index_add": Row(lambda w: w.index_add(0, torch.empty(0, dtype=torch.long), w[:0]), [W]),
    "attention": Row(lambda w: F.scaled_dot_product_attention(w[:0], w, w), [W]),
    "pow": Row(lambda w: w[:0] ** w[:0], [W]),
    "solve": Row(lambda w: torch.linalg.solve(w[:0, :0], w[:0]), [W]),
    "sinc, logaddexp": Row(lambda w: w[:0].sinc() + torch.logaddexp(w[:0], w[:0]), [W]),
    "normalize": Row(lambda w: F.normalize(w[:0]), [W]),
}

MASKS: dict[str, Row] = {
    # Masks and weights that have a gradient.
    "attention": Row(F.scaled_dot_product_attention, [*QKV, [[0.0, -0.5, 0.2], [1.0, 0.0, -1.0]]], attended),
    "attention, a row for all": Row(F.scaled_dot_product_attention, [*QKV, [[0.0, -0.5, 0.2]]], attended),
    "attention, some of it masked": Row(
        F.scaled_dot_product_attention, [*QKV, [[0.0, -INF, 0.2], [-INF, 0.0, -1.0]]], attended
    ),
    "attention, a row masked": Row(
        F.scaled_dot_product_attention, [*QKV, [[0.0, -INF, 0.2], [-INF] * 3]], attended
    ),
    "attention in tiles": Row(in_tiles, [*QKV, [[0.0, -0.5, 0.2], [1.0, 0.0, -1.0]]], attended),
    "attention in tiles, a row for all": Row(in_tiles, [*QKV, [[0.0, -INF, 0.2]]], attended),
    "attention in tiles, a row masked": Row(in_tiles, [*QKV, [[0.0, -INF, 0.2], [-INF] * 3]], attended),
    "a product": Row(torch.mul, [[2.0, 3.0], [0.0, 1.0]]),
    "where": Row(lambda x, m: torch.where(m > 0.5, x * m, m**2), [[2.0, 3.0], [0.0, 1.0]]),
    "softmax of a sum": Row(
        lambda x, m: (x + m).softmax(-1),
        [[2.0, 3.0], [0.0, -INF]],
        lambda x, m: torch.stack([0 * (x[0] + m[0]) + 1, 0 * (x[1] + m[0])]),
    ),
    "softmax by a logarithm": Row(
        lambda x, m: (x + m.log()).softmax(-1), [[2.0, 3.0, 1.0], [1.0, 0.5, 0.25]]
    ),
    "mse_loss": Row(lambda x, w: F.mse_loss(x, torch.zeros(2, dtype=D), weight=w), [[2.0, 0.0], [0.0, 1.0]]),
    "cross_entropy": Row(lambda x, w: F.cross_entropy(x, LABELS, reduction="none") * w, [ROWS, [0.0, 1.0]]),
    "cross_entropy, soft": Row(
        lambda x, y: F.cross_entropy(x, y), [ROWS, [[0.0, 0.0, 1.0], [0.5, 0.5, 0.0]]]
    ),
    "embedding, padded": Row(
        lambda w: F.embedding(torch.tensor([0, 1, 0, 2]), w, padding_idx=0),
        [[[1.0, 2.0], [0.0, 3.0], [1.0, 1.0]]],
        lambda w: (
            w[[0, 1, 0, 2]] * torch.tensor([[0.0], [1.0], [0.0], [1.0]])
            + w[[0, 1, 0, 2]].detach() * torch.tensor([[1.0], [0.0], [1.0], [0.0]])
        ),
    ),
    "dropout of nothing and of all": Row(lambda x: F.dropout(x, 0.0) ** 2 + F.dropout(x, 1.0), [[0.0, 2.0]]),
    "prelu": Row(F.prelu, [[2.0, -3.0], [0.0]]),
}

REFUSED: dict[str, tuple[Row, str]] = {
    "det of a singular matrix": (
        Row(torch.linalg.det, [[[1.0, 2.0], [2.0, 4.0]]]),
        "torch.linalg.det has wrong derivatives at a singular matrix",
    ),
    "det of one zero": (
        Row(torch.linalg.det, [[[0.0]]]),
        "torch.linalg.det has wrong derivatives at a singular matrix",
    ),
    "polar": (
        Row(lambda x, y: torch.view_as_real(torch.polar(x, y)), [[0.0], [1.0]]),
        "torch.polar has wrong derivatives",
    ),
    "cdist": (Row(torch.cdist, [[[1.0, 2.0]], [[1.0, 2.0]]]), "torch.cdist has no second derivative"),
    "pdist": (Row(F.pdist, [[[1.0, 2.0], [1.0, 2.0]]]), "F.pdist has no second derivative"),
}

OTHERWISE_IN_VMAP = (" max", "gaussian_nll_loss", "none: prelu")
"""There torch's first one shares no gradient among ties, its second one looks at values, and its last one raises."""
TABLES = {
    "zeros": ZEROS,
    "norms": NORMS,
    "selected": SELECTED,
    "logarithms": LOGS,
    "sizes": SIZES,
    "none": NONE,
    "masks": MASKS,
}
ALL = {f"{table}: {name}": row for table, rows in TABLES.items() for name, row in rows.items()}


def direction(number: int, like: Tensor) -> Tensor:
    """Between 0.5 and 1.5."""
    return 1 + 0.5 * torch.sin(1 + number + 1.7 * torch.arange(like.numel(), dtype=D)).reshape(like.shape)


def loss_of(function: Callable[..., Any], scale: Tensor, params: Sequence[Tensor]) -> Tensor:
    made = function(*params)
    # the last term, so that no operation whose result is empty leaves a parameter without gradient
    rest = sum(torch.where(p.isfinite(), p, 0).pow(3).sum() for p in params)
    return scale * (made * direction(9, made)).sum() + 0.3 * made.square().sum() + 0.1 * rest


def points_of(row: Row) -> list[Tensor]:
    return [torch.tensor(point, dtype=D, requires_grad=True) for point in row.points]


def scaled() -> Tensor:
    return torch.tensor(1.3, dtype=D, requires_grad=True)


class Held(nn.Module):
    def __init__(self, params: Sequence[Tensor]) -> None:
        super().__init__()
        self.params = nn.ParameterList([nn.Parameter(p.detach().clone()) for p in params])
        held: dict[str, Any] = self.params._parameters
        held.update((str(n), p) for n, p in enumerate(params))


def by_meta_sgd(
    loss: Callable[[Sequence[Tensor]], Tensor], params: Sequence[Tensor], _: Tensor
) -> list[Tensor]:
    held = Held(params)
    todist.MetaSGD(held, lr=1.0).step(lambda: loss(list(held.params)))
    return list(held.params)


def by_loop(
    adjoint: Any, loss: Callable[[Sequence[Tensor]], Tensor], params: Sequence[Tensor], scale: Tensor
) -> list[Tensor]:
    result = todist.inner_loop(loss, todist.sgd(lr=1.0), list(params), 1, meta=scale, adjoint=adjoint, seed=0)
    return list(result.params)


ROUTES: dict[str, Callable[..., list[Tensor]]] = {
    "recorded": partial(by_loop, todist.Recorded()),
    "replayed": partial(by_loop, todist.Replayed()),
    "MetaSGD": by_meta_sgd,
}


def products(row: Row, move: Callable[..., list[Tensor]]) -> list[Tensor]:
    """The derivatives of the gradients along a direction, by each parameter and by the scale, through a step."""
    params, scale = points_of(row), scaled()
    along = directions(params)
    moved = move(partial(loss_of, row.function, scale), params, scale)
    found = torch.autograd.grad(dot(moved, along), [*params, scale], materialize_grads=True)
    return [d - g for d, g in zip([*along, torch.zeros_like(scale)], found, strict=True)]


def directions(params: Sequence[Tensor]) -> list[Tensor]:
    return [direction(n, p) * p.isfinite() for n, p in enumerate(params)]


def dot(some: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
    return torch.stack([(x * y)[x.isfinite()].sum() for x, y in zip(some, others, strict=True)]).sum()


def expected_of(row: Row) -> list[Tensor]:
    params, scale = points_of(row), scaled()
    along = directions(params)
    if row.formula is not None:
        found = torch.autograd.grad(loss_of(row.formula, scale, params), params, create_graph=True)
        return list(torch.autograd.grad(dot(found, along), [*params, scale], materialize_grads=True))
    step = 1e-5

    def at(size: float) -> tuple[Tensor, ...]:
        moved = [(p.detach() + size * d).requires_grad_() for p, d in zip(params, along, strict=True)]
        return torch.autograd.grad(loss_of(row.function, scale, moved), [*moved, scale])

    return [(after - before) / (2 * step) for after, before in zip(at(step), at(-step), strict=True)]


@pytest.fixture(autouse=True)
def short_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "LONG", 1)
    monkeypatch.setattr(attention, "TILE", 1)
    monkeypatch.setattr(attention, "ROWS", 1)


@each_row("name", ALL)
def test_second_derivatives_are_those_of_differences_or_of_a_formula(name: str) -> None:
    expected = expected_of(ALL[name])
    assert all(x.isfinite().all() for x in expected)
    found = {way: products(ALL[name], move) for way, move in ROUTES.items()}
    torch.testing.assert_close(found, dict.fromkeys(ROUTES, expected), rtol=1e-5, atol=2e-6)


def in_vmap(move: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
    """The step of one sample."""

    def moved(loss: Any, params: Sequence[Tensor], scale: Tensor) -> list[Tensor]:
        made = torch.vmap(lambda *own: tuple(move(loss, own, scale)))(*[p.unsqueeze(0) for p in params])
        return [x.squeeze(0) for x in made]

    return moved


IN_VMAP = ROUTES | {"truncated": partial(by_loop, todist.Truncated(1))}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@each_row("name", [name for name in ALL if not name.endswith(OTHERWISE_IN_VMAP)])
def test_so_they_are_in_steps_and_in_loops_in_vmap(name: str) -> None:
    expected = expected_of(ALL[name])
    found = {way: products(ALL[name], in_vmap(move)) for way, move in IN_VMAP.items()}
    torch.testing.assert_close(found, dict.fromkeys(IN_VMAP, expected), rtol=1e-5, atol=2e-6)


@pytest.mark.filterwarnings("ignore:steps of an inner loop are recorded one by one")
@each_row("way", ROUTES)
@each_row("name", REFUSED)
def test_what_torch_has_wrong_is_refused(name: str, way: str) -> None:
    row, text = REFUSED[name]
    with pytest.raises(RuntimeError, match=text):
        products(row, ROUTES[way])


def near_an_end(
    adjoint: Any, loss: Callable[[Sequence[Tensor]], Tensor], params: Sequence[Tensor], scale: Tensor
) -> list[Tensor]:
    """By a loop whose loss is one of a valley, so that a Hessian can be solved with."""
    return by_loop(adjoint, lambda own: loss(own) + 5 * sum(p.square().sum() for p in own), params, scale)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.filterwarnings("ignore:.Implicit.* gives no gradient")
@each_row("table", ["zeros", "norms", "sizes"])
def test_so_they_are_in_implicit_gradients_in_vmap(table: str) -> None:
    solver = todist.linear_solve.solve_inv()
    move = partial(near_an_end, todist.Implicit(solver, not_converged="ignore"))
    seen = 0
    for name, row in TABLES[table].items():
        try:
            expected = products(row, move)
        except RuntimeError:  # there is no Hessian
            continue
        if all(x.isfinite().all() for x in expected):
            seen += 1
            found = products(row, in_vmap(move))
            torch.testing.assert_close(found, expected, msg=lambda text, name=name: f"{name}: {text}")
    assert seen > 15
