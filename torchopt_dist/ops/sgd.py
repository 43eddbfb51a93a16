"""Parameters, gradients, running sums → a step of stochastic gradient descent, differentiable or in place.

Let ``g`` be the gradient, negated to go up, plus ``weight_decay`` times the parameter. The running sum is
``b = momentum * b + taken * g``, and the step is ``-lr * b``, or with Nesterov's look-ahead
``-lr * (g + momentum * b)``; without momentum it is ``-lr * g``. ``taken`` is ``1 - dampening``, but 1 at a tensor's
first gradient, as in ``torch.optim.SGD``. [Sutskever et al. 2013, On the importance of initialization and momentum in
deep learning, equations 1 to 4.]

All that is linear in gradients, sums and parameters: the derivatives need none of their values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchopt_dist.ops import bias_correction, dispatch, foreach, node
from torchopt_dist.ops.columns import Columns, check_lengths, check_tensors, join, portions, split, widened
from torchopt_dist.ops.foreach import Factor, Factors
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
    kernel = dispatch.use_kernel("sgd", grads, join(columns.values()), fused)
    numbers = not any(isinstance(number, Tensor) for number in (lr, momentum, dampening, weight_decay))
    if fused and not numbers:
        raise RuntimeError("`fused=True` cannot be kept: the kernel takes hyper-parameters that are numbers")
    if not kernel:
        _check_tensors({"grads": grads, **columns}, _is_zero(weight_decay) and not nesterov)
    taken = foreach.combine(partial(_taken, dampening), bias_correction.values(counts)) if counts else 1.0
    step = _Sgd(
        lr,
        momentum,
        taken,
        nesterov,
        weight_decay,
        maximize,
        with_sums=sums is not None,
        with_params=params is not None,
        kernel_runs=kernel and numbers and dispatch.sees(taken, fused),
    )
    made = node.run(step, [grads, *columns.values()])
    return *made, *([] if counts is None else [bias_correction.count_up(counts)])


@dataclass(slots=True, eq=False)
class _Sgd(node.Step):
    lr: Factor
    momentum: Factor
    taken: Factors
    """How much of each gradient goes into the running sum."""
    nesterov: bool
    weight_decay: Factor
    maximize: bool
    with_sums: bool
    with_params: bool
    kernel_runs: bool

    @property
    def recorded(self) -> bool:
        """Torch's nodes for the formula's few operations are as fast as one for all."""
        return self.kernel_runs

    @property
    def uniform(self) -> bool:
        return not isinstance(self.taken, (list, tuple))

    def at(self, places: Sequence[int]) -> _Sgd:
        if not isinstance(self.taken, (list, tuple)):
            return self
        return replace(self, taken=[self.taken[place] for place in places])

    def formula(self, columns: Columns, inplace: bool = False) -> list[list[Tensor]]:
        given = [column or [] for column in columns]
        grads, params = given[0], given[-1] if self.with_params else None
        if self.maximize:
            grads = foreach.multiply(grads, -1)
        if params is not None and not _is_zero(self.weight_decay):
            grads = foreach.add(grads, params, self.weight_decay)
        along, sums = grads, []
        if self.with_sums:
            sums = [foreach.add(foreach.multiply(given[1], self.momentum), _times(grads, self.taken))]
            along = foreach.add(grads, sums[0], self.momentum) if self.nesterov else sums[0]
        if params is None:
            return [foreach.multiply(along, -self.lr), *sums]
        return [foreach.add(params, along, -self.lr), *sums]

    def kernel(self, columns: Columns) -> list[list[Tensor]]:
        given = [column or [] for column in columns]
        sums = given[1] if self.with_sums else []
        params = given[-1] if self.with_params else []
        made = torch.ops.todist.sgd(given[0], sums, params, self._row(len(given[0])), *self._numbers())
        return split(made, 1 + self.with_sums)

    def saved(self, given: Columns, made: Columns) -> Columns:
        return []

    def backward_formula(self, columns: Columns) -> list[list[Tensor]]:
        like = next(column for column in columns if column is not None)
        of_moved, *of_sums = (None if column is None else widened(column) for column in columns)
        of_steps = None if of_moved is None else foreach.multiply(of_moved, -self.lr)
        to_sums: list[list[Tensor]] = []
        of_uphill = of_steps or []
        if self.with_sums:
            through = of_steps and (foreach.multiply(of_steps, self.momentum) if self.nesterov else of_steps)
            both = foreach.add(of_sums[0], through) if of_sums[0] and through else of_sums[0] or through or []
            to_sums = [foreach.multiply(both, self.momentum)]
            of_uphill = _times(both, self.taken)
            if self.nesterov and of_steps:
                of_uphill = foreach.add(of_uphill, of_steps)
        found = [foreach.multiply(of_uphill, -1) if self.maximize else of_uphill, *to_sums]
        if self._decays():
            decayed = foreach.multiply(of_uphill, self.weight_decay)
            found.append(foreach.add(decayed, of_moved) if of_moved else decayed)
        return [[x.to(y.dtype) for x, y in zip(column, like, strict=True)] for column in found]

    def backward_kernel(self, columns: Columns) -> list[list[Tensor]]:
        first, *of_sums = columns
        first = first or [torch.zeros_like(x) for x in of_sums[0] or []]
        row = self._row(len(first))
        found = torch.ops.todist.sgd_backward(
            first, of_sums[0] or [] if of_sums else [], row, *self._numbers()
        )
        return split(found, 1 + self.with_sums + self._decays())

    def rest(self, flows: Sequence[Sequence[OptionalTensor]]) -> list[list[OptionalTensor]]:
        return [list(flows[0])] if self.with_params and not self._decays() else []

    def _decays(self) -> bool:
        return self.with_params and not _is_zero(self.weight_decay)

    def _row(self, count: int) -> Tensor:
        """``taken`` for the kernels: a number a tensor, and none without momentum."""
        return _row(self.taken, count if self.with_sums else 0)

    def _numbers(self) -> tuple[Any, ...]:
        return self.lr, self.momentum, self.nesterov, self.weight_decay, self.maximize


def _times(xs: list[Tensor], factor: Factors) -> list[Tensor]:
    return xs if isinstance(factor, (int, float)) and factor == 1 else foreach.multiply(xs, factor)


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
    if dispatch.use_kernel("sgd_", params, join(columns.values()), fused):
        taken = foreach.combine(partial(_taken, dampening), bias_correction.values(counts)) if counts else 1.0
        row = _row(taken, len(sums))
        torch.ops.todist.sgd_(
            list(params), list(grads), sums, row, lr, momentum, nesterov, weight_decay, maximize
        )
        torch.autograd.graph.increment_version([*params, *sums])
        if counts:
            bias_correction.count_up_(counts)
        return
    _check_tensors({"params": params, **columns}, weight_decay == 0 and not nesterov)
    with torch.no_grad():
        for part in portions(params):
            p, g, b, t = (list(column[part]) for column in (params, grads, sums, counts))
            if maximize:
                g = foreach.multiply(g, -1)
            if weight_decay != 0:
                g = foreach.add(g, p, weight_decay)
            if b:
                _sum_up_(b, g, t, momentum, dampening)
                g = foreach.add(g, b, momentum) if nesterov else b
            foreach.add(p, g, -lr, inplace=True)
            if t:
                bias_correction.count_up_(t)


def _sum_up_(
    sums: list[Tensor], grads: list[Tensor], steps: list[Tensor], momentum: float, dampening: float
) -> None:
    taken = foreach.combine(partial(_taken, dampening), bias_correction.values(steps)) if steps else 1.0
    foreach.multiply(sums, momentum, inplace=True)
    if isinstance(taken, (int, float)):
        foreach.add(sums, grads, taken, inplace=True)
    else:
        for total, grad, part in zip(sums, grads, taken, strict=True):
            foreach.add([total], [grad], part, inplace=True)


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
        columns["steps"] = bias_correction.counts(steps or [])
    check_lengths({name: first, **columns})
    return {name: list(column) for name, column in columns.items() if column is not None}


def _check_tensors(columns: dict[str, Sequence[Tensor]], may_be_sparse: bool) -> None:
    """As ``columns.check_tensors``; but a gradient that is only added to what is dense may be sparse."""
    if may_be_sparse and any(isinstance(g, Tensor) and g.is_sparse for g in columns["grads"]):
        dense = [_dense(g) for g in columns["grads"]]
        columns = {**columns, "grads": dense}
    check_tensors(columns)


def _dense(grad: Tensor) -> Tensor:
    """Of the shape of a sparse gradient, without its memory; what is no such gradient is left to be looked at."""
    if isinstance(grad, Tensor) and grad.is_sparse:
        return torch.zeros((), dtype=grad.dtype, device=grad.device).expand(grad.shape)
    return grad


def _is_zero(number: Factor) -> bool:
    return not isinstance(number, Tensor) and number == 0
