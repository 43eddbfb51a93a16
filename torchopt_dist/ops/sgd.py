"""Parameters, gradients, running sums → a step of stochastic gradient descent, differentiable or in place.

Let ``g`` be the gradient, negated to go up, plus ``weight_decay`` times the parameter. The running sum is
``b = momentum * b + taken * g``, and the step is ``-lr * b``, or with Nesterov's look-ahead
``-lr * (g + momentum * b)``; without momentum it is ``-lr * g``. ``taken`` is ``1 - dampening``, but 1 at a tensor's
first gradient, as in ``torch.optim.SGD``. [Sutskever et al. 2013, On the importance of initialization and momentum in
deep learning, equations 1 to 4.]

All that is linear in gradients, sums and parameters: the derivatives need none of their values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchopt_dist.ops import choice, counting, lists, table
from torchopt_dist.ops.lists import Factor, Factors
from torchopt_dist.typing import OptionalTensor

__all__ = ["sgd", "sgd_"]


def sgd(
    grads: list[Tensor],
    momentum_buffers: list[Tensor] | None = None,
    steps: Sequence[Tensor | float] | None = None,
    params: list[Tensor] | None = None,
    *,
    lr: Factor,
    momentum: Factor = 0.0,
    dampening: Factor = 0.0,
    nesterov: bool = False,
    weight_decay: Factor = 0.0,
    maximize: bool = False,
    fused: bool | None = None,
) -> tuple[list[Tensor], ...]:
    """Moved parameters and the next state; differentiable to any order, in the hyper-parameters too.

    Args:
        grads: real tensors of any shapes; without ``nesterov`` and ``weight_decay`` they may be sparse.
        momentum_buffers: their running sums, of the same shapes; none where ``momentum`` is 0.
        steps: how many gradients each has had: 0-d tensors on the CPU, or numbers; none where ``momentum`` or
            ``dampening`` is 0.
        params: parameters, of the same shapes; without them, the steps to be added to them are given.
        lr: learning rate; a number, or a tensor of one element, as all of these.
        momentum: how much of a running sum stays.
        dampening: how much of a gradient is left out of it, from the second one on.
        nesterov: look ahead.
        weight_decay: how much of a parameter is added to its gradient; needs ``params``.
        maximize: go up, not down.
        fused: None uses a kernel where there is one and it helps, False uses the formula here, True demands the kernel,
            which has no derivatives for hyper-parameters that are tensors.

    Returns:
        Moved parameters, or steps; with momentum also ``momentum_buffers``, and with dampening then ``steps``.

    Raises:
        TypeError: a list holds something else than dense tensors.
        ValueError: lists differ in length, or tensors that belong together in shape; or one is missing or not wanted.
        RuntimeError: ``fused=True`` where there is no kernel for these arguments; the message says why.
    """
    columns = _checked("grads", grads, {"params": params}, momentum_buffers, steps, momentum, dampening)
    if params is None and not _is_zero(weight_decay):
        raise ValueError(f"`params` must be given where `weight_decay` is not 0, got {weight_decay}")
    if fused is None and _is_zero(momentum) and _is_zero(weight_decay) and not maximize:
        fused = False  # the formula is one addition, and torch's own node for it is as fast
    counts, sums = columns.pop("steps", None), columns.get("momentum_buffers")
    kernel = choice.use_kernel("sgd", grads, table.join(columns.values()), fused)
    numbers = not any(isinstance(number, Tensor) for number in (lr, momentum, dampening, weight_decay))
    if fused and not numbers:
        raise RuntimeError("`fused=True` cannot be kept: the kernel takes hyper-parameters that are numbers")
    if not kernel:
        _check_tensors({"grads": grads, **columns}, _is_zero(weight_decay) and not nesterov)
    taken = lists.combine(partial(_taken, dampening), counting.values(counts)) if counts else 1.0
    options = _Options(
        lr, momentum, taken, nesterov, weight_decay, maximize, sums is not None, params is not None
    )
    given = [grads, *columns.values()]
    if kernel and numbers:
        if torch.is_grad_enabled() and any(x.requires_grad for x in table.join(given)):
            apply: Callable[..., tuple[Tensor, ...]] = _Sgd.apply
            made = table.split(apply(options, *table.join(given)), 1 + options.with_sums)
        else:
            made = _kernel(given, options)
    else:
        made = _formula(given, options)
    return *made, *([] if counts is None else [counting.count_up(counts)])


class _Options(NamedTuple):
    lr: Factor
    momentum: Factor
    taken: Factors
    """How much of each gradient goes into the running sum."""
    nesterov: bool
    weight_decay: Factor
    maximize: bool
    with_sums: bool
    with_params: bool

    def numbers(self) -> tuple[Any, ...]:
        return self.lr, self.momentum, self.nesterov, self.weight_decay, self.maximize

    def row(self, count: int) -> Tensor:
        """``taken`` for the kernels: a number a tensor, and none without momentum."""
        return _row(self.taken, count if self.with_sums else 0)


def _formula(given: Sequence[list[Tensor]], options: _Options) -> list[list[Tensor]]:
    """The reference: what the rest of this file computes is measured against it."""
    grads, *rest = given
    params = rest.pop() if options.with_params else None
    if options.maximize:
        grads = lists.multiply(grads, -1)
    if params is not None and not _is_zero(options.weight_decay):
        grads = lists.add(grads, params, options.weight_decay)
    along, sums = grads, [lists.multiply(column, options.momentum) for column in rest]
    if options.with_sums:
        sums = [lists.add(sums[0], _times(grads, options.taken))]
        along = lists.add(grads, sums[0], options.momentum) if options.nesterov else sums[0]
    if params is None:
        return [lists.multiply(along, -options.lr), *sums]
    return [lists.add(params, along, -options.lr), *sums]


def _times(xs: list[Tensor], factor: Factors) -> list[Tensor]:
    return xs if isinstance(factor, (int, float)) and factor == 1 else lists.multiply(xs, factor)


class _Sgd(torch.autograd.Function):
    """The whole list as one node, by the kernels."""

    @staticmethod
    def forward(ctx: Any, options: _Options, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.options = options
        ctx.set_materialize_grads(False)
        given = table.split(tensors, 1 + options.with_sums + options.with_params)
        return tuple(table.join(_kernel(given, options)))

    @staticmethod
    def backward(ctx: Any, *output_grads: OptionalTensor) -> tuple[OptionalTensor, ...]:
        options: _Options = ctx.options
        columns = table.split(output_grads, 1 + options.with_sums)
        length = len(columns[0])
        places = [place for place in range(length) if any(column[place] is not None for column in columns)]
        if len(places) < length:
            columns = [[column[place] for place in places] for column in columns]
            if isinstance(options.taken, (list, tuple)):
                options = options._replace(taken=[options.taken[place] for place in places])
        if not places:
            return None, *[None] * (length * (len(columns) + options.with_params))
        outer = [_filled(column, columns) for column in columns]
        if lists.are_batched(output_grads):
            with lists.in_loops():
                found = _backward(outer, options)
        elif torch.is_grad_enabled():
            found = _backward(outer, options)
        else:
            found = _kernel_backward(outer, options)
        return None, *table.join(table.put([None] * length, places, column) for column in found)


def _filled(column: list[OptionalTensor], columns: list[list[OptionalTensor]]) -> list[Tensor] | None:
    """Zeros in the places that are ``None``, like another column's tensor there; ``None`` if all are."""
    present = [x for x in column if x is not None]
    if len(present) == len(column):
        return present
    if not present:
        return None
    models = (next(x for x in row if x is not None) for row in zip(*columns, strict=True))
    return [torch.zeros_like(like) if x is None else x for x, like in zip(column, models, strict=True)]


def _backward(outer: table.Columns, options: _Options) -> list[list[Any]]:
    """What flows out to gradients, sums and parameters, by operations that can be differentiated again.

    Args:
        outer: what flows into the moved parameters, and into the new sums; ``None`` for zeros.
        options: as in the forward direction; hyper-parameters are numbers.
    """
    like = next(column for column in outer if column is not None)
    of_moved, *of_sums = (None if column is None else table.widened(column) for column in outer)
    of_steps = None if of_moved is None else lists.multiply(of_moved, -options.lr)
    to_sums: list[list[Tensor]] = []
    of_uphill = of_steps or []
    if options.with_sums:
        through = of_steps and (lists.multiply(of_steps, options.momentum) if options.nesterov else of_steps)
        both = lists.add(of_sums[0], through) if of_sums[0] and through else of_sums[0] or through or []
        to_sums = [lists.multiply(both, options.momentum)]
        of_uphill = _times(both, options.taken)
        if options.nesterov and of_steps:
            of_uphill = lists.add(of_uphill, of_steps)
    found = [lists.multiply(of_uphill, -1) if options.maximize else of_uphill, *to_sums]
    if options.with_params and options.weight_decay != 0:
        decayed = lists.multiply(of_uphill, options.weight_decay)
        found.append(lists.add(decayed, of_moved) if of_moved else decayed)
    found = [[x.to(y.dtype) for x, y in zip(column, like, strict=True)] for column in found]
    return _with_params(found, outer[0], options)


def _with_params(
    found: list[list[Tensor]], of_moved: list[Tensor] | None, options: _Options
) -> list[list[Any]]:
    """Without weight decay, what flows into a moved parameter flows on to the parameter as it is."""
    if options.with_params and options.weight_decay == 0:
        return [*found, [None] * len(found[0]) if of_moved is None else of_moved]
    return found


def _kernel(given: Sequence[list[Tensor]], options: _Options) -> list[list[Tensor]]:
    grads, *rest = given
    params = rest.pop() if options.with_params else []
    sums = rest[0] if rest else []
    made = torch.ops.todist.sgd(grads, sums, params, options.row(len(grads)), *options.numbers())
    return table.split(made, 1 + options.with_sums)


def _kernel_backward(outer: table.Columns, options: _Options) -> list[list[Any]]:
    of_moved, *of_sums = outer
    first = of_moved or [torch.zeros_like(x) for x in of_sums[0] or []]
    decayed = options.with_params and not _is_zero(options.weight_decay)
    found = torch.ops.todist.sgd_backward(
        first, of_sums[0] or [] if of_sums else [], options.row(len(first)), *options.numbers()
    )
    return _with_params(table.split(found, 1 + options.with_sums + decayed), of_moved, options)


def sgd_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor] = (),
    steps: Sequence[Tensor | float] = (),
    *,
    lr: float,
    momentum: float,
    dampening: float,
    nesterov: bool,
    weight_decay: float,
    maximize: bool,
    fused: bool | None = None,
) -> None:
    """Overwrite ``params``, ``momentum_buffers`` and ``steps``; what is refused is refused before that.

    It records no graph. The numbers are those of ``torch.optim.SGD(foreach=True)``, rounding included for the formula.

    Args:
        params: tensors of any shapes.
        grads: as many, of the same shapes; sparse ones as in :func:`sgd`.
        momentum_buffers: their running sums; none where ``momentum`` is 0.
        steps: as in :func:`sgd`; numbers are the caller's to count.
        lr: learning rate.
        momentum: how much of a running sum stays.
        dampening: how much of a gradient is left out of it, from the second one on.
        nesterov: look ahead.
        weight_decay: how much of a parameter is added to its gradient.
        maximize: go up, not down.
        fused: None uses a kernel where there is one, False the formula, True demands the kernel.

    Raises:
        TypeError: a list holds something else than dense tensors.
        ValueError: lists differ in length, or tensors that belong together in shape; or one is missing or not wanted.
        RuntimeError: ``fused=True`` where there is no kernel for these arguments; the message says why.
    """
    columns = _checked("params", params, {"grads": grads}, momentum_buffers, steps, momentum, dampening)
    counts, sums = columns.pop("steps", []), columns.get("momentum_buffers", [])
    if choice.use_kernel("sgd_", params, table.join(columns.values()), fused):
        taken = lists.combine(partial(_taken, dampening), counting.values(counts)) if counts else 1.0
        row = _row(taken, len(sums))
        torch.ops.todist.sgd_(
            list(params), list(grads), sums, row, lr, momentum, nesterov, weight_decay, maximize
        )
        torch.autograd.graph.increment_version([*params, *sums])
        if counts:
            counting.count_up_(counts)
        return
    _check_tensors({"params": params, **columns}, weight_decay == 0 and not nesterov)
    with torch.no_grad():
        for part in table.portions(params):
            p, g, b, t = (list(column[part]) for column in (params, grads, sums, counts))
            if maximize:
                g = lists.multiply(g, -1)
            if weight_decay != 0:
                g = lists.add(g, p, weight_decay)
            if b:
                _sum_up_(b, g, t, momentum, dampening)
                g = lists.add(g, b, momentum) if nesterov else b
            lists.add(p, g, -lr, inplace=True)
            if t:
                counting.count_up_(t)


def _sum_up_(
    sums: list[Tensor], grads: list[Tensor], steps: list[Tensor], momentum: float, dampening: float
) -> None:
    taken = lists.combine(partial(_taken, dampening), counting.values(steps)) if steps else 1.0
    lists.multiply(sums, momentum, inplace=True)
    if isinstance(taken, (int, float)):
        lists.add(sums, grads, taken, inplace=True)
    else:
        for total, grad, part in zip(sums, grads, taken, strict=True):
            lists.add([total], [grad], part, inplace=True)


def _taken(dampening: Factor, before: Factor) -> Factor:
    """How much of a gradient goes into the running sum, after so many before it: all of the first one."""
    if isinstance(before, Tensor):
        return torch.where(before > 0, 1 - dampening, 1.0)
    return 1 - dampening if before else 1.0


def _row(taken: Factors, count: int) -> Tensor:
    if isinstance(taken, (int, float)):
        return torch.full((count,), taken, dtype=torch.float64, device="cpu")
    return torch.tensor(taken, dtype=torch.float64, device="cpu")


def _checked(
    name: str,
    first: Sequence[Tensor],
    columns: dict[str, Sequence[Tensor] | None],
    momentum_buffers: Sequence[Tensor] | None,
    steps: Sequence[Tensor | float] | None,
    momentum: Factor,
    dampening: Factor,
) -> dict[str, list[Tensor]]:
    """The other lists by name, those that are there; each of them as long as the first one."""
    wanted = not _is_zero(momentum)
    if momentum_buffers and not wanted:
        raise ValueError(
            f"`momentum_buffers` must be left out where `momentum` is 0; got {len(momentum_buffers)}"
        )
    if wanted:
        columns = {"momentum_buffers": momentum_buffers or [], **columns}
    if wanted and not _is_zero(dampening):
        columns["steps"] = counting.counts(steps or [])
    table.check_lengths({name: first, **columns})
    return {name: list(column) for name, column in columns.items() if column is not None}


def _check_tensors(columns: dict[str, Sequence[Tensor]], may_be_sparse: bool) -> None:
    """As ``table.check_tensors``; but a gradient that is only added to what is dense may be sparse."""
    if may_be_sparse and any(isinstance(g, Tensor) and g.is_sparse for g in columns["grads"]):
        dense = [_dense(g) for g in columns["grads"]]
        columns = {**columns, "grads": dense}
    table.check_tensors(columns)


def _dense(grad: Tensor) -> Tensor:
    """Of the shape of a sparse gradient, without its memory; what is no such gradient is left to be looked at."""
    if isinstance(grad, Tensor) and grad.is_sparse:
        return torch.zeros((), dtype=grad.dtype, device=grad.device).expand(grad.shape)
    return grad


def _is_zero(number: Factor) -> bool:
    return not isinstance(number, Tensor) and number == 0
