"""Gradients, Adam's two averages → directions and new averages; or, in place, → moved parameters.

With the gradient ``g`` at a tensor's step ``t``, ``m = b1 * m + (1 - b1) * g`` and ``v = b2 * v + (1 - b2) * g**2``,
and the direction is ``m / (1 - b1**t) / (sqrt(v / (1 - b2**t) + eps_root) + eps)``. [Kingma and Ba 2015, Adam: A
Method for Stochastic Optimization, algorithm 1; ``eps_root`` as in optax.]

Where ``v / (1 - b2**t) + eps_root`` is 0, the root's derivative is infinite. It is taken to be 0 there, which is the
limit as the gradient goes to 0 from the first step on: ``v`` then falls with the gradient's square.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchopt_dist.ops import choice, counting, lists, table
from torchopt_dist.ops.lists import Factor, Factors

__all__ = ["adam", "adam_"]


def adam(
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: Sequence[Tensor | float],
    params: list[Tensor] | None = None,
    *,
    b1: Factor,
    b2: Factor,
    eps: Factor,
    eps_root: Factor,
    lr: float = 0.0,
    weight_decay: float = 0.0,
    fused: bool | None = None,
    inplace: bool = False,
) -> tuple[list[Tensor], ...]:
    """The directions and the next state; differentiable to any order, in ``eps`` and the decays too.

    With ``params``, these moved by ``-lr`` times the direction in its stead.

    Args:
        grads: real tensors of any shapes; so are ``exp_avgs`` (``m``) and ``exp_avg_sqs`` (``v``).
        exp_avgs: averages of the gradients.
        exp_avg_sqs: averages of their squares.
        steps: steps made so far: 0-d tensors on the CPU, or numbers.
        params: parameters, of the same shapes; not overwritten.
        b1: decay of ``exp_avgs``; a number, or a tensor of one element, as all of these four.
        b2: decay of ``exp_avg_sqs``.
        eps: added to the root.
        eps_root: added below the root.
        lr: learning rate, for ``params``.
        weight_decay: ``lr`` times how much of a parameter is taken off it (decoupled), for ``params``.
        fused: None uses a kernel where there is one, False uses the formulas here, True demands the kernel, which has
            no derivatives for hyper-parameters that are tensors.
        inplace: leave to overwrite ``exp_avgs``, ``exp_avg_sqs`` and ``steps``.

    Returns:
        Directions or moved parameters, ``exp_avgs``, ``exp_avg_sqs``, ``steps``.

    Raises:
        TypeError: a list holds something else than dense tensors.
        ValueError: the lists' lengths differ, or the shapes of tensors that belong together.
        RuntimeError: ``fused=True`` where there is no kernel for these arguments; the message says why.
    """
    named = {"grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs, "params": params}
    table.check_lengths({**named, "steps": steps})
    columns = [column for column in named.values() if column is not None]
    kernel = choice.use_kernel("adam", grads, table.join(columns[1:]), fused)
    numbers = not any(isinstance(number, Tensor) for number in (b1, b2, eps, eps_root))
    if fused and not numbers:
        raise RuntimeError("`fused=True` cannot be kept: the kernel takes hyper-parameters that are numbers")
    if not kernel:
        table.check_tensors(named)
    counts = counting.count_up(counting.counts(steps), inplace=inplace)
    left1, left2 = counting.bias_corrections((b1, b2), counts)
    move = (1.0, 1.0) if params is None else (-lr, 1 - lr * weight_decay)
    options = _Options(b1, b2, eps, eps_root, left1, left2, *move, kernel and numbers)
    if numbers and not lists.runs_in_a_loop(grads):
        if torch.is_grad_enabled() and any(x.requires_grad for x in table.join(columns)):
            apply: Callable[..., tuple[Tensor, ...]] = _Adam.apply
            return *table.split(apply(options, len(columns), *table.join(columns)), 3), counts
        if options.kernel:
            return *_kernel(columns, options), counts
    return *_formula(columns, options, inplace), counts


class _Options(NamedTuple):
    b1: Factor
    b2: Factor
    eps: Factor
    eps_root: Factor
    left1: Factors
    """``1 - b1**t``."""
    left2: Factors
    """``1 - b2**t``."""
    factor: float
    kept: float
    kernel: bool

    def scale(self) -> Factors:
        """What the root is multiplied by, so that only one side of the fraction is corrected."""
        return lists.combine(_over_root, self.left1, self.left2)

    def below_root(self) -> Factors:
        return lists.combine(_times, self.left2, self.eps_root)

    def besides_root(self) -> Factors:
        return lists.combine(_times, self.left1, self.eps)

    def corrections(self, count: int) -> Tensor:
        """For the kernels: a row a tensor."""
        columns = (self.left1, self.left2)
        if not any(isinstance(column, list) for column in columns):
            return torch.tensor(columns, dtype=torch.float64, device="cpu").expand(count, 2)
        rows = [column if isinstance(column, list) else [column] * count for column in columns]
        return torch.tensor(rows, dtype=torch.float64, device="cpu").t()

    def numbers(self) -> tuple[Any, ...]:
        return self.b1, self.b2, self.eps, self.eps_root


def _formula(columns: table.Columns, options: _Options, inplace: bool = False) -> list[list[Tensor]]:
    """The reference: what the rest of this file computes is measured against it."""
    grads, exp_avgs, exp_avg_sqs, *params = (column or [] for column in columns)
    exp_avgs, exp_avg_sqs = _averages(grads, exp_avgs, exp_avg_sqs, options, inplace)
    below = _denominators(_roots(exp_avg_sqs, options), options)
    moved = lists.divide(exp_avgs, below)
    if params:
        old = params[0] if options.kept == 1 else lists.multiply(params[0], options.kept)
        moved = lists.add(old, moved, options.factor)
    return [moved, exp_avgs, exp_avg_sqs]


def _averages(
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    options: _Options,
    inplace: bool = False,
) -> tuple[list[Tensor], list[Tensor]]:
    exp_avgs = lists.interpolate(exp_avgs, grads, 1 - options.b1, inplace=inplace)
    exp_avg_sqs = lists.multiply(exp_avg_sqs, options.b2, inplace=inplace)
    return exp_avgs, lists.add_product(exp_avg_sqs, grads, grads, 1 - options.b2, inplace=inplace)


def _roots(exp_avg_sqs: list[Tensor], options: _Options) -> list[Tensor]:
    if isinstance(options.eps_root, Tensor) or options.eps_root != 0:
        exp_avg_sqs = lists.add_number(exp_avg_sqs, options.below_root())
    return lists.square_root(exp_avg_sqs)


def _denominators(roots: list[Tensor], options: _Options) -> list[Tensor]:
    return lists.add_number(lists.multiply(roots, options.scale()), options.besides_root())


def _times(x: Factor, y: Factor) -> Factor:
    return x * y


def _over_root(x: Factor, y: Factor) -> Factor:
    return x / y**0.5


class _Adam(torch.autograd.Function):
    """The whole list as one node, for hyper-parameters that are numbers.

    The formula's backward needs the new averages, and is given them. The kernel's makes them again from the old ones,
    without the rounding to float16 or bfloat16 that they have as results.
    """

    @staticmethod
    def forward(ctx: Any, options: _Options, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        columns = table.split(tensors, count)
        if options.kernel:
            moved, *averages = _kernel(columns, options)
            ctx.save_for_backward(*table.join(columns[:3]))
        else:
            moved, *averages = _in_portions(_formula, columns, options)
            ctx.save_for_backward(*columns[0], *averages[0], *averages[1])
        ctx.options, ctx.with_params = options, count > 3
        ctx.set_materialize_grads(False)
        return *moved, *averages[0], *averages[1]

    @staticmethod
    def backward(ctx: Any, *output_grads: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = table.split(ctx.saved_tensors, 3)
        outer = [
            table.without_gaps(column, like)
            for column, like in zip(table.split(output_grads, 3), saved, strict=True)
        ]
        if lists.are_batched(output_grads):
            with lists.in_loops():
                found = _wide_backward([*saved, *outer], ctx.options)
        elif torch.is_grad_enabled():
            found = _wide_backward([*saved, *outer], ctx.options)
        elif ctx.options.kernel:
            found = _kernel_backward([*saved, *outer], ctx.options)
        else:
            found = _in_portions(_backward, [*saved, *outer], ctx.options)
        grads: list[Tensor | None] = [*table.join(found)]
        if ctx.with_params:
            of_moved, kept = list(output_grads[: len(saved[0])]), ctx.options.kept
            grads += of_moved if kept == 1 else [None if g is None else g * kept for g in of_moved]
        return None, None, *grads


def _wide_backward(columns: table.Columns, options: _Options) -> list[list[Tensor]]:
    """:func:`_backward` in float32 at least, from what the node has saved."""
    like = columns[0] or []
    grads, exp_avgs, exp_avg_sqs, *outer = (c if c is None else table.widened(c) for c in columns)
    if options.kernel:
        averages = _averages(grads or [], exp_avgs or [], exp_avg_sqs or [], options)
    else:
        averages = exp_avgs or [], exp_avg_sqs or []
    found = _backward([grads, *averages, *outer], options)
    return [[x.to(y.dtype) for x, y in zip(column, like, strict=True)] for column in found]


def _backward(columns: table.Columns, options: _Options) -> list[list[Tensor]]:
    """The gradients with respect to ``g``, ``m`` and ``v``, by operations that can be differentiated again.

    Args:
        columns: the gradients ``g`` and the new averages; then the gradients with respect to the moved parameters and
            to the new averages, ``None`` for zeros.
        options: as in the forward direction.
    """
    grads, exp_avgs, exp_avg_sqs = (column or [] for column in columns[:3])
    of_directions, of_avgs, of_sqs = columns[3:]
    if of_directions is not None:
        roots = _roots(exp_avg_sqs, options)
        below = _denominators(roots, options)
        over = lists.divide(of_directions, below)
        if options.factor != 1:
            over = lists.multiply(over, options.factor)
        slopes = lists.multiply(lists.slopes_of_roots(roots), options.scale())
        through = lists.product(lists.product(over, lists.divide(exp_avgs, below)), slopes)
        of_avgs = over if of_avgs is None else lists.add(of_avgs, over)
        of_sqs = lists.multiply(through, -1) if of_sqs is None else lists.add(of_sqs, through, -1.0)
    of_avgs = of_avgs or [torch.zeros_like(g) for g in grads]
    of_sqs = of_sqs or [torch.zeros_like(g) for g in grads]
    of_grads = lists.multiply(of_avgs, 1 - options.b1)
    of_grads = lists.add_product(of_grads, grads, of_sqs, 2 * (1 - options.b2))
    return [of_grads, lists.multiply(of_avgs, options.b1), lists.multiply(of_sqs, options.b2)]


def _in_portions(
    formula: Callable[..., list[list[Tensor]]], columns: table.Columns, options: _Options
) -> list[list[Tensor]]:
    if isinstance(options.left1, list) or isinstance(options.left2, list):  # the tensors' steps differ
        return formula(columns, options)
    return table.in_portions(partial(formula, options=options), columns)


def _kernel(columns: list[list[Tensor]], options: _Options) -> list[list[Tensor]]:
    grads, exp_avgs, exp_avg_sqs, *params = columns
    numbers = (options.corrections(len(grads)), options.factor, options.kept, *options.numbers())
    return table.split(torch.ops.todist.adam(grads, exp_avgs, exp_avg_sqs, *(params or [[]]), *numbers), 3)


def _kernel_backward(columns: table.Columns, options: _Options) -> list[list[Tensor]]:
    saved = columns[:3]
    first, *rest = (column or [] for column in columns[3:])
    first = first or [torch.zeros_like(g) for g in saved[0] or []]
    numbers = (options.corrections(len(first)), options.factor, *options.numbers())
    return table.split(torch.ops.todist.adam_backward(first, *rest, *saved, *numbers), 3)


def adam_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor | float],
    *,
    lr: float,
    b1: float,
    b2: float,
    eps: float,
    eps_root: float = 0.0,
    weight_decay: float = 0.0,
    decoupled: bool = False,
    maximize: bool = False,
    fused: bool | None = None,
) -> None:
    """A whole step of Adam or AdamW in place: ``params``, ``exp_avgs``, ``exp_avg_sqs`` and ``steps`` are overwritten.

    It records no graph. The formula's numbers are those of ``torch.optim.Adam(foreach=True)``, rounding included; the
    kernel rounds less often.

    Args:
        params: real tensors of any shapes.
        grads: as many, of the same shapes.
        exp_avgs: as in :func:`adam`.
        exp_avg_sqs: as in :func:`adam`.
        steps: as in :func:`adam`; numbers are the caller's to count.
        lr: learning rate.
        b1: as in :func:`adam`, but a number, as all of these.
        b2: as in :func:`adam`.
        eps: as in :func:`adam`.
        eps_root: as in :func:`adam`.
        weight_decay: how much of a parameter is added to its gradient; or, if ``decoupled``, ``lr`` times which is
            taken off the parameter.
        decoupled: AdamW's weight decay.
        maximize: go up, not down.
        fused: as in :func:`adam`.

    Raises:
        TypeError: as in :func:`adam`.
        ValueError: likewise.
        RuntimeError: likewise.
    """
    named = {"params": params, "grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    table.check_lengths({**named, "steps": steps})
    counts = counting.counts(steps)
    if choice.use_kernel("adam_", params, [*grads, *exp_avgs, *exp_avg_sqs], fused):
        left1, left2 = counting.bias_corrections((b1, b2), counts, ahead=1)
        corrections = _Options(b1, b2, eps, eps_root, left1, left2, 1.0, 1.0, True).corrections(len(counts))
        columns = (list(params), list(grads), list(exp_avgs), list(exp_avg_sqs))
        numbers = (float(lr), b1, b2, eps, eps_root, weight_decay, decoupled, maximize)
        torch.ops.todist.adam_(*columns, corrections, *numbers)
        torch.autograd.graph.increment_version([*params, *exp_avgs, *exp_avg_sqs])
        counting.count_up_(counts)  # a step that the kernel has refused is none
        return
    table.check_tensors(named)
    with torch.no_grad():
        for part in table.portions(params):
            p, g, m, v, t = (
                list(tensors[part]) for tensors in (params, grads, exp_avgs, exp_avg_sqs, counts)
            )
            if maximize:
                g = lists.multiply(g, -1)
            if weight_decay != 0 and not decoupled:
                g = lists.add(g, p, weight_decay)
            elif weight_decay != 0:
                lists.multiply(p, 1 - lr * weight_decay, inplace=True)
            counting.count_up_(t)
            lists.interpolate(m, g, 1 - b1, inplace=True)
            lists.multiply(v, b2, inplace=True)
            lists.add_product(v, g, g, 1 - b2, inplace=True)
            left1, left2 = counting.bias_corrections((b1, b2), t)
            below = v if eps_root == 0 else lists.add_number(v, lists.combine(_times, left2, eps_root))
            roots = lists.square_root(below)
            lists.divide_(roots, lists.combine(_root, left2))
            lists.add_number(roots, eps, inplace=True)
            lists.add_quotient_(p, m, roots, lists.combine(partial(_step_size, lr), left1))


def _root(x: Factor) -> Factor:
    return x**0.5


def _step_size(lr: float, left1: Factor) -> Factor:
    return -(lr / left1)
