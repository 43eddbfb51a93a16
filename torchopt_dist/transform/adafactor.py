"""Gradients → updates by Adafactor: Adam's denominator in the memory of a row and a column."""

from __future__ import annotations

import numbers
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchopt_dist import pytree
from torchopt_dist.core.types import OptState, Params, ScalarOrSchedule, TensorTree, Updates
from torchopt_dist.ops import _foreach as foreach
from torchopt_dist.ops._columns import pick, present, put
from torchopt_dist.transform._elementwise import check_dense, counts
from torchopt_dist.transform._hyperparameters import (
    HyperParameter,
    check_at_least_zero,
    check_learning_rate,
    check_said,
    is_per_leaf,
    is_schedule,
)
from torchopt_dist.transform._texts import documented
from torchopt_dist.transform.add_decayed_weights import penalized
from torchopt_dist.transform.base import GradientTransformation, chain

__all__ = ["AdafactorState", "adafactor"]


class AdafactorState(NamedTuple):
    """The state of :func:`adafactor`; the names are those of ``torch.optim.Adafactor``."""

    step: TensorTree
    """How many updates each parameter has had: a 0-d float32 tensor each, on the CPU."""
    row_var: TensorTree
    """Running means of the squared gradients over the last dimension, which is kept with size 1; ``None`` for
    parameters of fewer than two dimensions."""
    col_var: TensorTree
    """The same over the last dimension but one."""
    variance: TensorTree
    """Running averages of the squared gradients, for parameters of fewer than two dimensions; else ``None``."""


@documented
def adafactor(
    lr: ScalarOrSchedule = 1e-2,
    beta2_decay: float = -0.8,
    eps: tuple[float | None, HyperParameter] = (None, 1e-3),
    d: HyperParameter = 1.0,
    weight_decay: HyperParameter = 0.0,
    *,
    maximize: bool = False,
) -> GradientTransformation:
    """Adafactor, as ``torch.optim.Adafactor``: Adam's denominator in the memory of a row and a column of each matrix.

    In step ``t``, from 1, with ``w = t ** beta2_decay``: of each matrix the means ``r`` of ``g**2`` over columns and
    ``c`` over rows are averaged, ``r = (1 - w) r + w mean(g**2)``, and so ``c``; the variance is ``v = r c / mean(r)``.
    A parameter of fewer dimensions has ``v = (1 - w) v + w g**2`` itself. With ``u = g / sqrt(max(v, eps[0]**2))`` and
    the root of a mean square ``rms``, a step is ``p - lr * weight_decay * p - min(lr, 1 / sqrt(t)) * max(eps[1],
    rms(p)) * u / max(1, rms(u) / d)``. [Shazeer and Stern 2018, Adafactor: Adaptive Learning Rates with Sublinear
    Memory Cost, algorithms 4 and 5.]

    Args:
        lr: the largest step relative to the size of a parameter: a number that is at least 0, a tensor of one element,
            or a schedule (the number of steps made so far → a number).
        beta2_decay: the exponent by which the weight of a new gradient falls, at most 0.
        eps: the smallest root of a variance, a number above 0 (``None`` means the precision of the parameter's
            dtype); and the smallest size of a parameter that counts, at least 0, a number or a tensor of one element.
        d: the largest root of the mean square of an update, above 0; a number or a tensor of one element.
        weight_decay: decoupled.
        maximize: maximize the objective.

    Raises:
        TypeError: from ``init``: a parameter is complex.
        ValueError: from ``update``: ``params`` are missing.

    Example:
        >>> import torch
        >>> w = torch.tensor([1.0, -1.0])
        >>> impl = adafactor(lr=0.1)
        >>> impl.update(3 * w, impl.init(w), params=w)[0]
        tensor([-0.1000,  0.1000])
    """
    check_learning_rate("lr", lr)
    if is_per_leaf(lr):
        raise TypeError(
            f"`lr` must be a number, a tensor or a schedule for Adafactor, got a {type(lr).__name__}"
        )
    given: Any = beta2_decay
    if isinstance(given, bool) or not isinstance(given, numbers.Real):
        raise TypeError(f"`beta2_decay` must be a number, got {type(beta2_decay).__name__}")
    if not beta2_decay <= 0:
        raise ValueError(f"`beta2_decay` must be at most 0, got {beta2_decay}")
    if not isinstance(eps, (tuple, list)) or len(eps) != 2:
        raise TypeError(f"`eps` must be a pair of numbers, the first of which may be None, got {eps!r:.80}")
    if eps[0] is not None:
        _check_above_zero("eps[0]", eps[0])
    check_at_least_zero("eps[1]", eps[1])
    _check_above_zero("d", d)
    check_at_least_zero("weight_decay", weight_decay)
    update = partial(_update, lr, float(beta2_decay), (eps[0], eps[1]), d, weight_decay)
    return chain(*penalized(0.0, maximize), GradientTransformation(_init, update))


def _check_above_zero(name: str, value: Any) -> None:
    check_at_least_zero(name, value)
    if not isinstance(value, Tensor) and value == 0:
        raise ValueError(f"`{name}` must be above 0, got {value}")


def _init(params: Params, /) -> AdafactorState:
    leaves, spec = pytree.flatten(params)
    fields: list[list[Tensor | None]] = [[None] * len(leaves) for _ in range(3)]
    for place in present(leaves):
        leaf: Any = leaves[place]
        if leaf.is_complex():
            raise TypeError(f"`params` must be real for Adafactor, got {leaf.dtype} at leaf {place}")
        if leaf.ndim < 2:
            fields[2][place] = torch.zeros_like(leaf, requires_grad=False)
        else:
            fields[0][place] = leaf.new_zeros((*leaf.shape[:-1], 1))
            fields[1][place] = leaf.new_zeros((*leaf.shape[:-2], 1, leaf.shape[-1]))
    row, col, variance = (pytree.unflatten(spec, field) for field in fields)
    return AdafactorState(counts(params), row, col, variance)


def _update(
    lr: ScalarOrSchedule,
    beta2_decay: float,
    eps: tuple[float | None, HyperParameter],
    d: HyperParameter,
    weight_decay: HyperParameter,
    updates: Updates,
    state: AdafactorState,
    *,
    params: Params | None = None,
    inplace: bool = False,
) -> tuple[Updates, OptState]:
    if not isinstance(state, AdafactorState):
        raise TypeError(f"`state` must be an AdafactorState, got {type(state).__name__}")
    if params is None:
        raise ValueError(
            "`params` must be given to `update`: Adafactor's steps are relative to them, got None"
        )
    leaves, spec = pytree.flatten(updates)
    weights = pytree.flatten_like(spec, params, "params", "updates")
    fields = [
        list(pytree.flatten_like(spec, tree, f"state.{name}", "updates"))
        for name, tree in zip(state._fields, state, strict=True)
    ]
    steps, rows, cols, variances = fields
    places = present(leaves)
    check_dense(pick(leaves, places))
    new_steps = foreach.add_number(pick(steps, places), 1)
    steps = put(steps, places, new_steps)
    for place, count in zip(places, new_steps, strict=True):
        grad, param = leaves[place], weights[place]
        wide = torch.promote_types(grad.dtype, torch.float32)
        step = count.to(grad.device, wide)
        share = step**beta2_decay
        square = grad.square()
        if grad.ndim < 2:
            variance = variances[place] = _averaged(variances[place], square, share)
        else:
            row = rows[place] = _averaged(rows[place], square.mean(-1, keepdim=True), share)
            col = cols[place] = _averaged(cols[place], square.mean(-2, keepdim=True), share)
            variance = row @ col / row.mean(-2, keepdim=True).clamp(min=_precision(eps[0], grad))
        unit = grad * variance.clamp(min=_precision(eps[0], grad) ** 2).rsqrt()
        rate = _rate(lr, step)
        size = _at_least(eps[1], _rms(param))
        relative = torch.minimum(torch.as_tensor(rate, dtype=wide, device=grad.device), step.rsqrt())
        shrunk = unit / _at_least(1.0, _rms(unit) / _scalar(d, grad))
        moved = -(relative * size) * shrunk
        if isinstance(weight_decay, Tensor) or weight_decay:
            moved = moved - rate * _scalar(weight_decay, grad) * param
        leaves[place] = moved.to(grad.dtype)
    trees = [pytree.unflatten(spec, field) for field in (steps, rows, cols, variances)]
    return pytree.unflatten(spec, leaves), AdafactorState(*trees)


def _averaged(average: Tensor, new: Tensor, share: Tensor) -> Tensor:
    return (average + share * (new - average)).to(average.dtype)


def _precision(least: float | None, like: Tensor) -> float:
    return torch.finfo(like.dtype).eps if least is None else least


def _rate(lr: Any, step: Tensor) -> Any:
    rate = check_said("lr", lr(step - 1)) if is_schedule(lr) else lr
    return rate.reshape(()).to(step.device) if isinstance(rate, Tensor) else rate


def _scalar(value: HyperParameter, like: Tensor) -> HyperParameter:
    return value.reshape(()).to(like.device) if isinstance(value, Tensor) else value


def _at_least(least: HyperParameter, x: Tensor) -> Tensor:
    return torch.maximum(torch.as_tensor(least, dtype=x.dtype, device=x.device).reshape(()), x)


def _rms(x: Tensor) -> Tensor:
    """The root of the mean square, with a derivative of 0 at 0; in float32 for half precision."""
    x = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    mean = x.square().sum() / max(x.numel(), 1)
    there = mean > 0
    return torch.where(there, torch.where(there, mean, 1.0).sqrt(), 0.0)
