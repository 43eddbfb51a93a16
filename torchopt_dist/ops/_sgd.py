"""Gradients, running sums, parameters → a step of stochastic gradient descent, differentiable or in place.

Let ``g`` be the gradient, negated to maximize, plus ``weight_decay`` times the parameter. The step is ``-lr`` times
``g``, or times what ``with_momentum`` makes of it. ``1 - dampening`` of it goes into the running sum, but all of a
tensor's first gradient, as in ``torch.optim.SGD``.

All results are linear in gradients, sums and parameters: the derivatives need none of their values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchopt_dist.ops import _bias_correction as bias_correction
from torchopt_dist.ops import _foreach as foreach
from torchopt_dist.ops import _node as node
from torchopt_dist.ops import library
from torchopt_dist.ops._columns import (
    Columns,
    are_alike,
    check_lengths,
    check_tensors,
    join,
    overwrite_by,
    pick,
    split,
)
from torchopt_dist.ops._foreach import Factor, Factors, is_zero

__all__ = ["sgd", "sgd_", "with_momentum"]


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
    inplace: bool = False,
) -> tuple[list[Tensor], ...]:
    """Moved parameters and the next state; differentiable to any order, in the hyper-parameters too.

    Args:
        grads: real tensors of any shapes; without ``nesterov`` and ``weight_decay`` they may be sparse.
        momentum_buffers: their running sums, of the same shapes; none where ``momentum`` is 0.
        steps: how many gradients each has had: 0-d tensors on the CPU, or numbers; none where ``momentum`` or
            ``dampening`` is 0.
        params: parameters, of the same shapes; without them, the first result is the steps to be added to them.
        lr: learning rate; a number, or a tensor of one element, as all of these.
        momentum: the decay of a running sum.
        dampening: how much of a gradient is left out of the sum, from the second one on.
        nesterov: use Nesterov's look-ahead.
        weight_decay: how much of a parameter is added to its gradient; needs ``params``.
        maximize: maximize the objective.
        fused: None uses a kernel where there is one and it helps, False uses the formula, True raises an error where
            there is no kernel. The kernel has no derivatives for hyper-parameters that are tensors.
        inplace: if True, may overwrite ``momentum_buffers``, ``steps`` and ``params``.

    Returns:
        Moved parameters, or steps; with momentum also ``momentum_buffers``, and with dampening then ``steps``.

    Raises:
        TypeError: a list holds something else than dense tensors.
        ValueError: lists differ in length, or tensors that belong together in shape; or one is missing or not wanted.
        RuntimeError: ``fused=True`` where there is no kernel for these arguments; the message says why.
    """
    only_adds = not fused and is_zero(momentum) and is_zero(weight_decay) and not maximize
    if only_adds and params is not None and not momentum_buffers and not isinstance(lr, Tensor):
        library.check_choice(fused)
        check_lengths({"grads": grads, "params": params})
        _check_tensors({"grads": grads, "params": params}, True)
        return (foreach.add(params, grads, -lr, inplace=inplace),)
    columns = _checked("grads", grads, {"params": params}, momentum_buffers, steps, momentum, dampening)
    if params is None and not is_zero(weight_decay):
        raise ValueError(f"`params` must be given where `weight_decay` is not 0, got {weight_decay}")
    if fused is None and only_adds:
        fused = False  # the formula is one addition, and torch's own node for it is as fast
    counts, sums = columns.pop("steps", None), columns.get("momentum_buffers")
    kernel = library.use_kernel(
        "sgd", grads, join(columns.values()), fused, lr, momentum, dampening, weight_decay
    )
    if not kernel:
        _check_tensors({"grads": grads, **columns}, is_zero(weight_decay) and not nesterov)
    taken = _taken(dampening, counts)
    step = _Sgd(
        lr,
        momentum,
        taken,
        nesterov,
        weight_decay,
        maximize,
        with_params=params is not None,
        kernel_runs=kernel and library.are_concrete(taken, fused),
    )
    given = [grads, sums, columns.get("params")]
    made = node.run(step, given, inplace)
    return *made, *([] if counts is None else [bias_correction.count_up(counts, inplace=inplace)])


def with_momentum(
    directions: list[Tensor],
    sums: list[Tensor],
    momentum: Factor,
    *,
    taken: Factors = 1.0,
    nesterov: bool = False,
    inplace: bool = False,
) -> tuple[list[Tensor], list[Tensor]]:
    """The directions with momentum, and the next sums, which are the same tensors without ``nesterov``.

    Args:
        directions: tensors of any shapes (``g``).
        sums: their running sums (``b``).
        momentum: the decay of the sum; a number, or a tensor of one element.
        taken: the fraction of a direction that is added to its sum; one number for all, or one for each.
        nesterov: use Nesterov's look-ahead: ``g + momentum * b``. [Sutskever et al. 2013, On the importance of
            initialization and momentum in deep learning, equations 1 to 4, without the learning rate in the sum.]
        inplace: if True, overwrites ``sums``.
    """
    sums = foreach.multiply(sums, momentum, inplace=inplace)
    if isinstance(taken, (int, float)):
        sums = foreach.add(sums, directions, taken, inplace=inplace)
    else:
        sums = foreach.add(sums, foreach.multiply(directions, taken), inplace=inplace)
    return foreach.add(directions, sums, momentum) if nesterov else sums, sums


@dataclass(slots=True, eq=False)
class _Sgd(node.Step):
    lr: Factor
    momentum: Factor
    taken: Factors
    """How much of each gradient goes into the running sum."""
    nesterov: bool
    weight_decay: Factor
    maximize: bool
    with_params: bool
    kernel_runs: bool

    @property
    def is_one_node(self) -> bool:
        """Torch's nodes for the formula's few operations are as fast as one for all."""
        return self.kernel_runs

    @property
    def is_uniform(self) -> bool:
        return not isinstance(self.taken, (list, tuple))

    @property
    def direct_factor(self) -> float | None:
        return 1.0 if self.with_params and not self._decays() else None

    def at(self, places: Sequence[int]) -> _Sgd:
        if not isinstance(self.taken, (list, tuple)):
            return self
        return replace(self, taken=[self.taken[place] for place in places])

    def formula(self, columns: Columns, inplace: bool = False) -> list[list[Tensor]]:
        grads, sums, params = columns
        moved = foreach.descent_gradients(grads or [], params, self.weight_decay, self.maximize)
        state: list[list[Tensor]] = []
        if sums is not None:
            moved, *state = with_momentum(
                moved, sums, self.momentum, taken=self.taken, nesterov=self.nesterov, inplace=inplace
            )
        if params is not None:
            moved = foreach.add(params, moved, -self.lr, inplace=inplace)
        elif isinstance(self.lr, Tensor) or self.lr != -1:
            moved = foreach.multiply(moved, -self.lr)
        return [moved, *state]

    def kernel(self, columns: Columns) -> list[list[Tensor]]:
        grads, sums, params = columns
        arguments = self._arguments(grads or [], sums is not None)
        return split(
            torch.ops.todist.sgd(grads, sums or [], params or [], *arguments), 1 + (sums is not None)
        )

    def saved(self, columns: Columns) -> Columns:
        return [None] * len(columns)

    def backward_kernel(self, saved: Columns, grad_outputs: Columns) -> list[list[Tensor]]:
        first, *of_sums = grad_outputs
        first = first or [torch.zeros_like(x) for x in of_sums[0] or []]
        arguments = self._arguments(first, bool(of_sums))
        found = torch.ops.todist.sgd_backward(first, *([x or [] for x in of_sums] or [[]]), *arguments)
        return split(found, 1 + len(of_sums) + self._decays())

    def _decays(self) -> bool:
        return self.with_params and not is_zero(self.weight_decay)

    def _arguments(self, tensors: list[Tensor], with_sums: bool) -> tuple[Any, ...]:
        """The numbers that the kernels take: ``taken`` of each tensor, none without momentum, and the same for all."""
        taken = self.taken if isinstance(self.taken, (list, tuple)) else [self.taken] * len(tensors)
        row = torch.tensor(taken if with_sums else [], dtype=torch.float64, device="cpu")
        return row, self.lr, self.momentum, self.nesterov, self.weight_decay, self.maximize


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

    The step records no graph. It is the fused one of ``torch.optim``, where that takes the tensors; otherwise it is
    :func:`sgd`, whose results are written over the arguments.

    The arguments are those of :func:`sgd`, all hyper-parameters numbers; counts that are numbers are the caller's to
    count.
    """
    columns = _checked("params", params, {"grads": grads}, momentum_buffers, steps, momentum, dampening)
    counts, sums = columns.pop("steps", None), columns.get("momentum_buffers")
    lists = [list(params), list(grads), sums or []]
    fused_step = library.torch_fused_step("sgd", lists if sums else lists[:2], fused)
    with torch.no_grad():
        if fused_step is not None:
            for places, dampened in _by_dampening(counts, dampening):
                picked = lists if places is None else [pick(column, places) for column in lists]
                fused_step(
                    *picked,
                    lr=float(lr),
                    momentum=momentum,
                    dampening=dampened,
                    nesterov=nesterov,
                    weight_decay=weight_decay,
                    maximize=maximize,
                    is_first_step=False,
                )
            bias_correction.count_up_(counts or [])
            torch.autograd.graph.increment_version([*params, *(sums or [])])  # torch's step leaves them
            return
        if fused is False:  # before the first portion is written
            _check_tensors({"params": params, **columns}, weight_decay == 0 and not nesterov)
        numbers = {"lr": lr, "momentum": momentum, "dampening": dampening, "nesterov": nesterov}
        decay = {"weight_decay": weight_decay, "maximize": maximize}
        overwrite_by(sgd, lists[1], [sums, counts], lists[0], fused=fused, **numbers, **decay)


def _by_dampening(counts: list[Tensor] | None, dampening: float) -> list[tuple[list[int] | None, float]]:
    """The dampening of the tensors at which places; ``None`` for all places."""
    values = bias_correction.values(counts) if counts else 1.0
    if not isinstance(values, list):
        return [(None, dampening if values else 0.0)]
    first, later = ([p for p, before in enumerate(values) if bool(before) is b] for b in (False, True))
    return [(places, number) for places, number in ((first, 0.0), (later, dampening)) if places]


def _taken(dampening: Factor, counts: list[Tensor] | None) -> Factors:
    """How much of each gradient goes into its running sum: all of a tensor's first one."""
    if not counts:
        return 1.0
    return foreach.combine(partial(_taken_after, dampening), bias_correction.values(counts))


def _taken_after(dampening: Factor, before: Factor) -> Factor:
    if isinstance(before, Tensor):
        return torch.where(before > 0, 1 - dampening, 1.0)
    return 1 - dampening if before else 1.0


def _checked(
    name: str,
    first: Sequence[Tensor],
    columns: dict[str, Sequence[Tensor] | None],
    momentum_buffers: Sequence[Tensor] | None,
    steps: Sequence[Tensor | float] | None,
    momentum: Factor,
    dampening: Factor,
) -> dict[str, list[Tensor]]:
    """Validate the lengths of the lists; return the other lists that are there, by name."""
    wanted = not is_zero(momentum)
    if momentum_buffers and not wanted:
        raise ValueError(
            f"`momentum_buffers` must be left out where `momentum` is 0; got {len(momentum_buffers)}"
        )
    if wanted:
        columns = {"momentum_buffers": momentum_buffers or [], **columns}
    if wanted and not is_zero(dampening):
        columns["steps"] = bias_correction.counts(steps or [])
    check_lengths({name: first, **columns})
    return {name: list(column) for name, column in columns.items() if column is not None}


def _check_tensors(columns: dict[str, Sequence[Tensor]], may_be_sparse: bool) -> None:
    """As ``columns.check_tensors``; but a gradient that is only added to what is dense may be sparse."""
    if are_alike(list(columns.values())):
        return
    if may_be_sparse and any(isinstance(g, Tensor) and g.is_sparse for g in columns["grads"]):
        dense = [_dense(g) for g in columns["grads"]]
        columns = {**columns, "grads": dense}
    check_tensors(columns)


def _dense(grad: Tensor) -> Tensor:
    """Zeros of the shape of a sparse gradient, in the memory of one element; anything else is returned as it is."""
    if isinstance(grad, Tensor) and grad.is_sparse:
        return torch.zeros((), dtype=grad.dtype, device=grad.device).expand(grad.shape)
    return grad
