"""Gradients, Adam's two averages → directions and new averages; or, in place, → moved parameters.

With the gradient ``g`` at a tensor's step ``t``, ``m = b1 * m + (1 - b1) * g`` and ``v = b2 * v + (1 - b2) * g**2``,
and the direction is ``m / (1 - b1**t) / (sqrt(v / (1 - b2**t) + eps_root) + eps)``. [Kingma and Ba 2015, Adam: A
Method for Stochastic Optimization, algorithm 1; ``eps_root`` as in optax.]

Where ``v / (1 - b2**t) + eps_root`` is 0, the root's derivative is infinite. It is taken to be 0 there, which is the
limit as the gradient goes to 0 from the first step on: ``v`` then falls with the gradient's square.
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
    decoupled: bool = False,
    maximize: bool = False,
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
        weight_decay: how much of a parameter is added to its gradient; or, if ``decoupled``, ``lr`` times which is
            taken off the parameter. It needs ``params``.
        decoupled: AdamW's weight decay.
        maximize: go up, not down.
        fused: None uses a kernel where there is one, False uses the formulas here, True demands the kernel, which has
            no derivatives for hyper-parameters that are tensors.
        inplace: leave to overwrite ``exp_avgs``, ``exp_avg_sqs`` and ``steps``.

    Returns:
        Directions or moved parameters, ``exp_avgs``, ``exp_avg_sqs``, ``steps``.

    Raises:
        TypeError: a list holds something else than dense tensors.
        ValueError: the lists' lengths differ, or the shapes of tensors that belong together; or ``params`` are missing.
        RuntimeError: ``fused=True`` where there is no kernel for these arguments; the message says why.
    """
    if params is None and weight_decay != 0:
        raise ValueError(f"`params` must be given where `weight_decay` is not 0, got {weight_decay}")
    named = {"grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs, "params": params}
    check_lengths({**named, "steps": steps})
    columns = [column for column in named.values() if column is not None]
    kernel = dispatch.use_kernel("adam", grads, join(columns[1:]), fused)
    numbers = not any(isinstance(number, Tensor) for number in (b1, b2, eps, eps_root))
    if fused and not numbers:
        raise RuntimeError("`fused=True` cannot be kept: the kernel takes hyper-parameters that are numbers")
    if not kernel:
        check_tensors(named)
    counts = bias_correction.counts(steps)
    left1, left2 = bias_correction.bias_corrections((b1, b2), counts, ahead=1)
    kernel = kernel and numbers and dispatch.sees(left1, fused)
    step = _Adam(
        b1,
        b2,
        eps,
        eps_root,
        left1,
        left2,
        factor=1.0 if params is None else -lr,
        kept=1 - lr * weight_decay if decoupled else 1.0,
        decay=0.0 if decoupled else weight_decay,
        maximize=maximize,
        with_params=params is not None,
        kernel_runs=kernel,
    )
    return *node.run(step, columns, inplace), bias_correction.count_up(counts, inplace=inplace)


@dataclass(slots=True, eq=False)
class _Adam(node.Step):
    b1: Factor
    b2: Factor
    eps: Factor
    eps_root: Factor
    left1: Factors
    """``1 - b1**t``."""
    left2: Factors
    """``1 - b2**t``."""
    factor: float
    """What the direction is multiplied by before it is added to the parameter."""
    kept: float
    """How much of the parameter stays."""
    decay: float
    """How much of it is added to the gradient."""
    maximize: bool
    with_params: bool
    kernel_runs: bool

    @property
    def recorded(self) -> bool:
        numbers = not any(isinstance(number, Tensor) for number in self._numbers())
        return numbers and dispatch.sees(self.left1, None)

    @property
    def uniform(self) -> bool:
        return not isinstance(self.left1, list) and not isinstance(self.left2, list)

    def at(self, places: Sequence[int]) -> _Adam:
        lefts = [x if not isinstance(x, list) else [x[p] for p in places] for x in (self.left1, self.left2)]
        return replace(self, left1=lefts[0], left2=lefts[1])

    def formula(self, columns: Columns, inplace: bool = False) -> list[list[Tensor]]:
        grads, exp_avgs, exp_avg_sqs, *params = (column or [] for column in columns)
        grads = self._penalized(grads, params)
        exp_avgs, exp_avg_sqs = self._averages(grads, exp_avgs, exp_avg_sqs, inplace)
        moved = foreach.divide(exp_avgs, self._denominators(self._roots(exp_avg_sqs)))
        if params:
            old = params[0] if self.kept == 1 else foreach.multiply(params[0], self.kept)
            moved = foreach.add(old, moved, self.factor)
        return [moved, exp_avgs, exp_avg_sqs]

    def kernel(self, columns: Columns) -> list[list[Tensor]]:
        grads, exp_avgs, exp_avg_sqs, *params = (column or [] for column in columns)
        made = torch.ops.todist.adam(
            grads, exp_avgs, exp_avg_sqs, *(params or [[]]), *self._arguments(len(grads))
        )
        return split(made, 3)

    def saved(self, given: Columns, made: Columns) -> Columns:
        """The formula's derivative needs the new averages, and is given them.

        The kernel's makes them again from the old ones, without the rounding to float16 or bfloat16 that they have as
        results.
        """
        averages = given[1:3] if self.kernel_runs else made[1:]
        return [given[0], *averages, given[3] if self.decay != 0 else None]

    def backward_formula(self, columns: Columns) -> list[list[Tensor]]:
        like = columns[0] or []
        grads, exp_avgs, exp_avg_sqs, params, *flows = (c if c is None else widened(c) for c in columns)
        grads, exp_avgs, exp_avg_sqs = grads or [], exp_avgs or [], exp_avg_sqs or []
        grads = self._penalized(grads, [params] if params else [])
        if self.kernel_runs:
            exp_avgs, exp_avg_sqs = self._averages(grads, exp_avgs, exp_avg_sqs)
        of_directions, of_avgs, of_sqs = flows
        if of_directions is not None:
            roots = self._roots(exp_avg_sqs)
            below = self._denominators(roots)
            over = foreach.divide(of_directions, below)
            if self.factor != 1:
                over = foreach.multiply(over, self.factor)
            slopes = foreach.multiply(foreach.slopes_of_roots(roots), self._scale())
            through = foreach.product(foreach.product(over, foreach.divide(exp_avgs, below)), slopes)
            of_avgs = over if of_avgs is None else foreach.add(of_avgs, over)
            of_sqs = foreach.multiply(through, -1) if of_sqs is None else foreach.add(of_sqs, through, -1.0)
        of_avgs = of_avgs or [torch.zeros_like(g) for g in grads]
        of_sqs = of_sqs or [torch.zeros_like(g) for g in grads]
        of_grads = foreach.multiply(of_avgs, 1 - self.b1)
        of_grads = foreach.add_product(of_grads, grads, of_sqs, 2 * (1 - self.b2))
        found = [of_grads, foreach.multiply(of_avgs, self.b1), foreach.multiply(of_sqs, self.b2)]
        if self.maximize:
            found[0] = foreach.multiply(of_grads, -1)
        if self.decay != 0:
            decayed = foreach.multiply(of_grads, self.decay)
            found.append(decayed if flows[0] is None else foreach.add(decayed, flows[0], self.kept))
        return [[x.to(y.dtype) for x, y in zip(column, like, strict=True)] for column in found]

    def backward_kernel(self, columns: Columns) -> list[list[Tensor]]:
        saved = [column or [] for column in columns[:4]]
        first, *rest = (column or [] for column in columns[4:])
        first = first or [torch.zeros_like(g) for g in saved[0]]
        made = torch.ops.todist.adam_backward(first, *rest, *saved, *self._arguments(len(first)))
        return split(made, 3 + (self.decay != 0))

    def rest(self, flows: Sequence[Sequence[OptionalTensor]]) -> list[list[OptionalTensor]]:
        if not self.with_params or self.decay != 0:
            return []
        if self.kept == 1:
            return [list(flows[0])]
        return [[None if x is None else x * self.kept for x in flows[0]]]

    def _penalized(self, grads: list[Tensor], params: list[list[Tensor]]) -> list[Tensor]:
        """The gradients downhill, and with the weight decay that goes through the averages."""
        if self.maximize:
            grads = foreach.multiply(grads, -1)
        return foreach.add(grads, params[0], self.decay) if self.decay != 0 else grads

    def _averages(
        self,
        grads: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        inplace: bool = False,
    ) -> tuple[list[Tensor], list[Tensor]]:
        exp_avgs = foreach.interpolate(exp_avgs, grads, 1 - self.b1, inplace=inplace)
        exp_avg_sqs = foreach.multiply(exp_avg_sqs, self.b2, inplace=inplace)
        return exp_avgs, foreach.add_product(exp_avg_sqs, grads, grads, 1 - self.b2, inplace=inplace)

    def _roots(self, exp_avg_sqs: list[Tensor]) -> list[Tensor]:
        if isinstance(self.eps_root, Tensor) or self.eps_root != 0:
            exp_avg_sqs = foreach.add_number(exp_avg_sqs, foreach.combine(_times, self.left2, self.eps_root))
        return foreach.square_root(exp_avg_sqs)

    def _denominators(self, roots: list[Tensor]) -> list[Tensor]:
        eps = foreach.combine(_times, self.left1, self.eps)
        return foreach.add_number(foreach.multiply(roots, self._scale()), eps)

    def _scale(self) -> Factors:
        """What the root is multiplied by, so that only one side of the fraction is corrected."""
        return foreach.combine(_over_root, self.left1, self.left2)

    def _numbers(self) -> tuple[Factor, ...]:
        return self.b1, self.b2, self.eps, self.eps_root

    def _arguments(self, count: int) -> tuple[Any, ...]:
        """For the kernels."""
        move = (_corrections(self.left1, self.left2, count), self.factor, self.kept)
        return *move, *self._numbers(), self.decay, self.maximize


def _corrections(left1: Factors, left2: Factors, count: int) -> Tensor:
    """For the kernels: a row a tensor."""
    columns = (left1, left2)
    if not any(isinstance(column, list) for column in columns):
        return torch.tensor(columns, dtype=torch.float64, device="cpu").expand(count, 2)
    rows = [column if isinstance(column, list) else [column] * count for column in columns]
    return torch.tensor(rows, dtype=torch.float64, device="cpu").t()


def _times(x: Factor, y: Factor) -> Factor:
    return x * y


def _over_root(x: Factor, y: Factor) -> Factor:
    return x / y**0.5


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
    check_lengths({**named, "steps": steps})
    counts = bias_correction.counts(steps)
    if dispatch.use_kernel("adam_", params, [*grads, *exp_avgs, *exp_avg_sqs], fused):
        left1, left2 = bias_correction.bias_corrections((b1, b2), counts, ahead=1)
        corrections = _corrections(left1, left2, len(counts))
        columns = (list(params), list(grads), list(exp_avgs), list(exp_avg_sqs))
        numbers = (float(lr), b1, b2, eps, eps_root, weight_decay, decoupled, maximize)
        torch.ops.todist.adam_(*columns, corrections, *numbers)
        torch.autograd.graph.increment_version([*params, *exp_avgs, *exp_avg_sqs])
        bias_correction.count_up_(counts)  # a step that the kernel has refused is none
        return
    check_tensors(named)
    with torch.no_grad():
        for part in portions(params):
            p, g, m, v, t = (
                list(tensors[part]) for tensors in (params, grads, exp_avgs, exp_avg_sqs, counts)
            )
            if maximize:
                g = foreach.multiply(g, -1)
            if weight_decay != 0 and not decoupled:
                g = foreach.add(g, p, weight_decay)
            elif weight_decay != 0:
                foreach.multiply(p, 1 - lr * weight_decay, inplace=True)
            bias_correction.count_up_(t)
            foreach.interpolate(m, g, 1 - b1, inplace=True)
            foreach.multiply(v, b2, inplace=True)
            foreach.add_product(v, g, g, 1 - b2, inplace=True)
            left1, left2 = bias_correction.bias_corrections((b1, b2), t)
            below = v if eps_root == 0 else foreach.add_number(v, foreach.combine(_times, left2, eps_root))
            roots = foreach.square_root(below)
            foreach.divide_(roots, foreach.combine(_root, left2))
            foreach.add_number(roots, eps, inplace=True)
            foreach.add_quotient_(p, m, roots, foreach.combine(partial(_step_size, lr), left1))


def _root(x: Factor) -> Factor:
    return x**0.5


def _step_size(lr: float, left1: Factor) -> Factor:
    return -(lr / left1)
