"""Gradients, averages of their squares → directions or moved parameters, and the next state; or all that in place.

With the gradient ``g``, ``v = alpha * v + (1 - alpha) * g**2``, and the direction is ``g / (sqrt(v) + eps)``; centered,
also ``a = alpha * a + (1 - alpha) * g``, and the root is that of ``v - a**2``, a variance, which is 0 where rounding
makes it negative. With momentum, ``b`` stands for the direction ``u``: ``b = momentum * b + u``, or
``u + momentum * b`` with Nesterov's look-ahead. [Tieleman and Hinton 2012, Neural Networks for Machine Learning,
lecture 6.5; centered: Graves 2013, Generating Sequences With Recurrent Neural Networks, equations 38 to 45; momentum:
as in ``torch.optim.RMSprop``.] The root's derivative at 0 is taken to be 0, the limit as the gradient goes to 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchopt_dist.ops import _foreach as foreach
from torchopt_dist.ops import _node as node
from torchopt_dist.ops import library
from torchopt_dist.ops._columns import (
    Columns,
    check_lengths,
    check_tensors,
    flatten,
    join,
    narrowed,
    overwrite_by,
    split,
    widened,
)
from torchopt_dist.ops._foreach import Factor
from torchopt_dist.ops._sgd import with_momentum

__all__ = ["rmsprop", "rmsprop_"]


def rmsprop(
    grads: list[Tensor],
    square_avgs: list[Tensor],
    grad_avgs: list[Tensor] | None = None,
    momentum_buffers: list[Tensor] | None = None,
    params: list[Tensor] | None = None,
    *,
    alpha: Factor,
    eps: Factor,
    momentum: Factor = 0.0,
    nesterov: bool = False,
    lr: float = 0.0,
    fused: bool | None = None,
    inplace: bool = False,
) -> tuple[list[Tensor], ...]:
    """The directions and the next state; differentiable to any order, in ``alpha``, ``eps`` and ``momentum`` too.

    With ``momentum_buffers``, their sums in the directions' stead; with ``params``, these moved by ``-lr`` times that.

    Args:
        grads: real tensors of any shapes; so are all of these.
        square_avgs: averages of the squared gradients (``v``).
        grad_avgs: averages of the gradients (``a``); ``None`` unless centered.
        momentum_buffers: running sums of the directions (``b``); ``None`` where ``momentum`` is 0.
        params: parameters.
        alpha: decay of the averages; a number, or a tensor of one element.
        eps: added to the root; a number, or a tensor of one element.
        momentum: the decay of a running sum; a number, or a tensor of one element.
        nesterov: use Nesterov's look-ahead.
        lr: learning rate, for ``params``.
        fused: None uses a kernel where there is one, False the formulas, True raises an error where there is no kernel.
            The kernel has no derivatives for hyper-parameters that are tensors.
        inplace: if True, may overwrite the averages, the running sums and the parameters.

    Returns:
        Directions or moved parameters, ``square_avgs``, ``grad_avgs`` if centered, ``momentum_buffers`` if given.

    Raises:
        TypeError: a list holds something else than dense tensors.
        ValueError: the lists' lengths differ, or the shapes of tensors that belong together; or one of ``momentum`` and
            ``momentum_buffers`` comes without the other.
        RuntimeError: ``fused=True`` where there is no kernel for these arguments; the message says why.
    """
    named = {
        "grads": grads,
        "square_avgs": square_avgs,
        "grad_avgs": grad_avgs,
        "momentum_buffers": momentum_buffers,
        "params": params,
    }
    _check_lengths(named, momentum)
    columns = list(named.values())
    kernel = library.use_kernel("rmsprop", grads, flatten(columns[1:])[1], fused, alpha, eps, momentum)
    if not kernel:
        check_tensors(named)
    factor = 1.0 if params is None else -lr
    there = tuple(column is not None for column in columns)
    step = _RMSprop(alpha, eps, momentum, nesterov, factor, there, kernel)
    return tuple(node.run(step, columns, inplace))


def _check_lengths(named: Mapping[str, Sequence[Tensor] | None], momentum: Factor) -> None:
    """Demand lists of one length, and running sums where there is a momentum, and only there."""
    check_lengths(named)
    given = named["momentum_buffers"] is not None
    # A branch, since a compiler may have a symbol for the number.
    if isinstance(momentum, Tensor) or momentum != 0:
        rule = "" if given else f"given: `momentum` is {momentum}"
    else:
        rule = "left out where `momentum` is 0" if given else ""
    if named["grads"] and rule:
        raise ValueError(f"`momentum_buffers` must be {rule}")


@dataclass(slots=True, eq=False)
class _RMSprop(node.Step):
    alpha: Factor
    eps: Factor
    momentum: Factor
    nesterov: bool
    factor: float
    there: tuple[bool, ...]
    """Which columns there are: gradients, averages of squares, averages, running sums, parameters."""
    kernel_runs: bool

    @property
    def is_one_node(self) -> bool:
        return not any(isinstance(number, Tensor) for number in (self.alpha, self.eps, self.momentum))

    def at(self, places: Sequence[int]) -> _RMSprop:
        return self

    @property
    def direct_factor(self) -> float | None:
        return 1.0 if self.there[4] else None

    def formula(self, columns: Columns, inplace: bool = False) -> list[list[Tensor]]:
        """Half precision is computed in float32."""
        grads, square_avgs, grad_avgs, sums, params = (c if c is None else widened(c) for c in columns)
        grads, square_avgs = grads or [], square_avgs or []
        square_avgs = foreach.multiply(square_avgs, self.alpha, inplace=inplace)
        square_avgs = foreach.add_product(square_avgs, grads, grads, 1 - self.alpha, inplace=inplace)
        below = square_avgs
        if grad_avgs is not None:
            grad_avgs = foreach.interpolate(grad_avgs, grads, 1 - self.alpha, inplace=inplace)
            below = foreach.add_product(square_avgs, grad_avgs, grad_avgs, -1.0)
        below = foreach.square_root(below, at_least_zero=grad_avgs is not None)
        below = foreach.add_number(below, self.eps, inplace=inplace)
        if sums is not None:
            moved = foreach.divide(grads, below)
            moved, sums = with_momentum(moved, sums, self.momentum, nesterov=self.nesterov, inplace=inplace)
            if params is not None:
                moved = foreach.add(params, moved, self.factor, inplace=inplace)
            elif moved is sums:
                moved = [x.clone() for x in moved]
        elif params is not None:
            moved = foreach.add_quotient(params, grads, below, self.factor, inplace=inplace)
        else:
            moved = foreach.divide(grads, below)
        like = columns[0] if params is None else columns[4]
        state = [
            narrowed(new, old, inplace=inplace)
            for new, old in zip((square_avgs, grad_avgs, sums), columns[1:4], strict=True)
            if new is not None and old is not None
        ]
        return [narrowed(moved, like or []), *state]

    def kernel(self, columns: Columns) -> list[list[Tensor]]:
        made = torch.ops.todist.rmsprop(*(column or [] for column in columns), *self._numbers())
        return split(made, sum(self.there[:4]))

    def saved(self, columns: Columns) -> Columns:
        """The old averages: the new ones are rounded where the tensors are float16 or bfloat16."""
        return [*columns[:3], None, None]

    def backward_kernel(self, saved: Columns, grad_outputs: Columns) -> list[list[Tensor]]:
        inputs = [column or [] for column in saved[:3]]
        given = iter([column or [] for column in grad_outputs])
        into = [next(given) if there else [] for there in self.there[:4]]
        into[0] = into[0] or [torch.zeros_like(x) for x in inputs[0]]
        made = torch.ops.todist.rmsprop_backward(*into, *inputs, *self._numbers())
        return split(made, len(made) // len(inputs[0]))

    def _numbers(self) -> tuple[Any, ...]:
        return self.factor, self.alpha, self.eps, self.momentum, self.nesterov


def rmsprop_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    square_avgs: Sequence[Tensor],
    grad_avgs: Sequence[Tensor] = (),
    momentum_buffers: Sequence[Tensor] = (),
    *,
    lr: float,
    alpha: float,
    eps: float,
    momentum: float,
    nesterov: bool,
    weight_decay: float,
    maximize: bool,
    fused: bool | None = None,
) -> None:
    """Overwrite ``params`` and the state.

    It records no graph. The numbers are those of ``torch.optim.RMSprop(foreach=True)`` to rounding.

    The arguments are those of :func:`rmsprop`, all hyper-parameters numbers; ``weight_decay`` times a parameter is
    added to its gradient, which ``maximize`` negates before.
    """
    named = {
        "params": params,
        "grads": grads,
        "square_avgs": square_avgs,
        "grad_avgs": grad_avgs or None,
        "momentum_buffers": momentum_buffers or None,
    }
    _check_lengths(named, momentum)
    columns = [column or () for column in named.values()]
    if library.use_kernel("rmsprop_", params, join(columns[1:]), fused):
        if params:  # without a tensor, torch has no device to choose a kernel by
            numbers = (lr, alpha, eps, momentum, nesterov, weight_decay, maximize)
            torch.ops.todist.rmsprop_(*map(list, columns), *numbers)
        torch.autograd.graph.increment_version([*params, *square_avgs, *grad_avgs, *momentum_buffers])
        return
    if fused is False:
        check_tensors(named)  # before the first portion is written
    p, g, *state = (list(column) for column in columns)
    options = {"lr": lr, "alpha": alpha, "eps": eps, "momentum": momentum, "nesterov": nesterov}
    with torch.no_grad():
        op = partial(_penalized, weight_decay, maximize)
        overwrite_by(op, g, [state[0], *(column or None for column in state[1:])], p, fused=fused, **options)


def _penalized(
    weight_decay: float, maximize: bool, grads: list[Tensor], *rest: Any, **numbers: Any
) -> tuple[list[Tensor], ...]:
    return rmsprop(foreach.descent_gradients(grads, rest[-1], weight_decay, maximize), *rest, **numbers)
