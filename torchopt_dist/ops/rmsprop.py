"""Gradients, averages of their squares → directions or moved parameters, and the next state; or all that in place.

With the gradient ``g``, ``v = alpha * v + (1 - alpha) * g**2``, and the direction is ``g / (sqrt(v) + eps)``; centered,
also ``a = alpha * a + (1 - alpha) * g``, and the root is that of ``v - a**2``. With momentum, ``b`` stands for the
direction ``u``: ``b = momentum * b + u``, or ``u + momentum * b`` with Nesterov's look-ahead. [Tieleman and Hinton
2012, Neural Networks for Machine Learning, lecture 6.5; centered: Graves 2013, Generating Sequences With Recurrent
Neural Networks, equations 38 to 45; momentum: as in ``torch.optim.RMSprop``.] The root's derivative at 0 is taken to
be 0, the limit as the gradient goes to 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchopt_dist.ops import dispatch, foreach, node
from torchopt_dist.ops.columns import (
    Columns,
    check_lengths,
    check_tensors,
    flatten,
    join,
    portions,
    split,
    widened,
)
from torchopt_dist.ops.foreach import Factor
from torchopt_dist.typing import OptionalTensor

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
        params: parameters; not overwritten.
        alpha: decay of the averages; a number, or a tensor of one element.
        eps: added to the root; likewise.
        momentum: how much of a running sum stays; likewise.
        nesterov: look ahead.
        lr: learning rate, for ``params``.
        fused: None uses a kernel where there is one, False the formulas here, True demands the kernel, which has no
            derivatives for hyper-parameters that are tensors.
        inplace: leave to overwrite the averages and the running sums.

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
    kernel = dispatch.use_kernel("rmsprop", grads, flatten(columns[1:])[1], fused)
    numbers = not any(isinstance(number, Tensor) for number in (alpha, eps, momentum))
    if fused and not numbers:
        raise RuntimeError("`fused=True` cannot be kept: the kernel takes hyper-parameters that are numbers")
    if not kernel:
        check_tensors(named)
    factor = 1.0 if params is None else -lr
    there = tuple(column is not None for column in columns)
    step = _RMSprop(alpha, eps, momentum, nesterov, factor, there, kernel and numbers)
    return tuple(node.run(step, columns, inplace))


def _check_lengths(named: Mapping[str, Sequence[Tensor] | None], momentum: Factor) -> None:
    """Demand lists of one length, and running sums where there is a momentum, and only there."""
    check_lengths(named)
    given = named["momentum_buffers"] is not None
    if named["grads"] and given != (isinstance(momentum, Tensor) or momentum != 0):
        rule = "left out where `momentum` is 0" if given else f"given: `momentum` is {momentum}"
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
    def recorded(self) -> bool:
        return not any(isinstance(number, Tensor) for number in (self.alpha, self.eps, self.momentum))

    def at(self, places: Sequence[int]) -> _RMSprop:
        return self

    def formula(self, columns: Columns, inplace: bool = False) -> list[list[Tensor]]:
        """Halves are computed in float32."""
        wide = [None if column is None else widened(column) for column in columns]
        grads, _, _, sums, params = wide
        square_avgs, grad_avgs, below = self._below_root(wide, inplace)
        moved = foreach.divide(grads or [], foreach.add_number(foreach.square_root(below), self.eps))
        if sums is not None:
            directions = moved
            sums = foreach.add(foreach.multiply(sums, self.momentum, inplace=inplace), moved, inplace=inplace)
            if self.nesterov:
                moved = foreach.add(directions, sums, self.momentum)
            else:
                moved = sums if params is not None else [b.clone() for b in sums]
        if params is not None:
            moved = foreach.add(params, moved, self.factor)
        like = columns[0] if params is None else columns[4]
        state = [
            _narrowed(new, old, inplace)
            for new, old in zip((square_avgs, grad_avgs, sums), columns[1:4], strict=True)
            if new is not None and old is not None
        ]
        return [_narrowed(moved, like or []), *state]

    def kernel(self, columns: Columns) -> list[list[Tensor]]:
        made = torch.ops.todist.rmsprop(*(column or [] for column in columns), *self._numbers())
        return split(made, sum(self.there[:4]))

    def saved(self, given: Columns, made: Columns) -> Columns:
        """The new averages are made again, without the rounding to float16 or bfloat16 that they have as results."""
        return given[:3]

    def backward_formula(self, columns: Columns) -> list[list[Tensor]]:
        wide = [None if column is None else widened(column) for column in columns]
        grads, _, _, *flows = wide
        flows_of = iter(flows)
        of_moved, of_squares, of_avgs, of_sums = (next(flows_of) if here else None for here in self.there[:4])
        grads, alpha, momentum = grads or [], self.alpha, self.momentum
        of_directions = of_moved if of_moved is None else foreach.multiply(of_moved, self.factor)
        if self.there[3]:
            of_last = of_directions
            if of_last is not None:
                ahead = foreach.multiply(of_last, momentum) if self.nesterov else of_last
                of_sums = ahead if of_sums is None else foreach.add(of_sums, ahead)
            of_directions = of_sums
            if self.nesterov and of_last is not None and of_sums is not None:
                of_directions = foreach.add(of_sums, of_last)
        of_grads = None
        if of_directions is not None:
            _, new_avgs, below = self._below_root(wide)
            roots = foreach.square_root(below)
            below = foreach.add_number(roots, self.eps)
            of_grads = foreach.divide(of_directions, below)
            through = foreach.product(foreach.divide(grads, below), foreach.slopes_of_roots(roots))
            through = foreach.product(of_grads, through)
            of_squares = _sum(of_squares, foreach.multiply(through, -1))
            if new_avgs is not None:
                of_avgs = _sum(of_avgs, foreach.multiply(foreach.product(new_avgs, through), 2))
        of_squares = _or_zeros(of_squares, grads)
        twice = foreach.multiply(foreach.product(grads, of_squares), 2 * (1 - alpha))
        found = [_sum(of_grads, twice), foreach.multiply(of_squares, alpha)]
        if self.there[2]:
            of_avgs = _or_zeros(of_avgs, grads)
            found[0] = foreach.add(found[0], of_avgs, 1 - alpha)
            found.append(foreach.multiply(of_avgs, alpha))
        if self.there[3]:
            found.append(foreach.multiply(_or_zeros(of_sums, grads), momentum))
        return [_narrowed(column, columns[0] or []) for column in found]

    def backward_kernel(self, columns: Columns) -> list[list[Tensor]]:
        grads, square_avgs, grad_avgs, *flows = (column or [] for column in columns)
        flows_of = iter(flows)
        into = [next(flows_of) if here else [] for here in self.there[:4]]
        into[0] = _or_zeros(into[0] or None, grads)
        made = torch.ops.todist.rmsprop_backward(*into, grads, square_avgs, grad_avgs, *self._numbers())
        return split(made, len(made) // len(grads))

    def rest(self, flows: Sequence[Sequence[OptionalTensor]]) -> list[list[OptionalTensor]]:
        return [list(flows[0])] if self.there[4] else []

    def _below_root(
        self, columns: Columns, inplace: bool = False
    ) -> tuple[list[Tensor], list[Tensor] | None, list[Tensor]]:
        """The next averages, and what the root is taken of."""
        grads, square_avgs, grad_avgs = (column or [] for column in columns[:3])
        square_avgs = foreach.multiply(square_avgs, self.alpha, inplace=inplace)
        square_avgs = foreach.add_product(square_avgs, grads, grads, 1 - self.alpha, inplace=inplace)
        if columns[2] is None:
            return square_avgs, None, square_avgs
        grad_avgs = foreach.interpolate(grad_avgs, grads, 1 - self.alpha, inplace=inplace)
        return square_avgs, grad_avgs, foreach.add_product(square_avgs, grad_avgs, grad_avgs, -1.0)

    def _numbers(self) -> tuple[Any, ...]:
        return self.factor, self.alpha, self.eps, self.momentum, self.nesterov


def _narrowed(xs: list[Tensor], like: list[Tensor], inplace: bool = False) -> list[Tensor]:
    """The way back from :func:`columns.widened`, into the tensors of ``like`` if ``inplace``."""
    return [
        x if x.dtype == y.dtype else y.copy_(x) if inplace else x.to(y.dtype)
        for x, y in zip(xs, like, strict=True)
    ]


def _sum(xs: list[Tensor] | None, ys: list[Tensor]) -> list[Tensor]:
    return ys if xs is None else foreach.add(xs, ys)


def _or_zeros(xs: list[Tensor] | None, like: list[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(x) for x in like] if xs is None else xs


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

    Args:
        params: real tensors of any shapes.
        grads: as many, of the same shapes.
        square_avgs: running averages of the squared gradients.
        grad_avgs: running averages of the gradients; none unless centered.
        momentum_buffers: running sums of the steps; none where ``momentum`` is 0.
        lr: learning rate.
        alpha: decay of the averages.
        eps: added to the denominator.
        momentum: how much of a running sum stays.
        nesterov: look ahead.
        weight_decay: how much of a parameter is added to its gradient.
        maximize: go up, not down.
        fused: None uses a kernel where there is one, False the formula, True demands the kernel.

    Raises:
        TypeError: as in :func:`rmsprop`.
        ValueError: likewise.
        RuntimeError: likewise.
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
    if dispatch.use_kernel("rmsprop_", params, join(columns[1:]), fused):
        if params:  # without a tensor, torch has no device to choose a kernel by
            numbers = (lr, alpha, eps, momentum, nesterov, weight_decay, maximize)
            torch.ops.todist.rmsprop_(*map(list, columns), *numbers)
        torch.autograd.graph.increment_version([*params, *square_avgs, *grad_avgs, *momentum_buffers])
        return
    check_tensors(named)
    with torch.no_grad():
        for part in portions(params):
            p, g, v, a, b = (list(column[part]) for column in columns)
            if maximize:
                g = foreach.multiply(g, -1)
            if weight_decay != 0:
                g = foreach.add(g, p, weight_decay)
            foreach.multiply(v, alpha, inplace=True)
            foreach.add_product(v, g, g, 1 - alpha, inplace=True)
            below = v
            if a:
                foreach.interpolate(a, g, 1 - alpha, inplace=True)
                below = foreach.add_product(v, a, a, -1.0)
            roots = foreach.square_root(below)
            foreach.add_number(roots, eps, inplace=True)
            if not b:
                foreach.add_quotient_(p, g, roots, -lr)
                continue
            foreach.multiply(b, momentum, inplace=True)
            foreach.add_quotient_(b, g, roots, 1.0)
            if nesterov:
                foreach.add_quotient_(p, g, roots, -lr)
            foreach.add(p, b, -lr * momentum if nesterov else -lr, inplace=True)
