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
from typing import Any

import torch
from torch import Tensor

from torchopt_dist.core.types import OptionalTensor
from torchopt_dist.ops import _bias_correction as bias_correction
from torchopt_dist.ops import _foreach as foreach
from torchopt_dist.ops import _node as node
from torchopt_dist.ops import library
from torchopt_dist.ops._columns import (
    Columns,
    check_lengths,
    check_tensors,
    flatten,
    overwrite_by,
    split,
)
from torchopt_dist.ops._foreach import Factor, Factors

__all__ = ["AdamOp", "adam", "adam_", "corrections_of"]


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

    With ``params``, the first result is not the directions but the parameters moved by ``-lr`` times the directions.

    Args:
        grads: real tensors of any shapes; so are ``exp_avgs`` (``m``) and ``exp_avg_sqs`` (``v``).
        exp_avgs: averages of the gradients.
        exp_avg_sqs: averages of the squared gradients.
        steps: steps made so far: 0-d tensors on the CPU, or numbers.
        params: parameters, of the same shapes.
        b1: decay of ``exp_avgs``; a number, or a tensor of one element, as all of these four.
        b2: decay of ``exp_avg_sqs``.
        eps: added to the root.
        eps_root: added below the root.
        lr: learning rate, for ``params``.
        weight_decay: how much of a parameter is added to its gradient; or, if ``decoupled``, ``lr`` times how much of
            the parameter is subtracted from it. It needs ``params``.
        decoupled: AdamW's weight decay.
        maximize: maximize the objective.
        fused: None uses a kernel where there is one, False uses the formula, True raises an error where there is no
            kernel. The kernel has no derivatives for hyper-parameters that are tensors.
        inplace: if True, may overwrite ``exp_avgs``, ``exp_avg_sqs``, ``steps`` and ``params``.

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
    columns = list(named.values())
    kernel = library.use_kernel("adam", grads, flatten(columns[1:])[1], fused, b1, b2, eps, eps_root)
    if not kernel:
        check_tensors(named)
    counts = bias_correction.counts(steps)
    bias_correction1, bias_correction2 = bias_correction.bias_corrections((b1, b2), counts, ahead=1)
    step = _Adam(
        b1,
        b2,
        eps,
        eps_root,
        bias_correction1,
        bias_correction2,
        direction_factor=1.0 if params is None else -lr,
        param_factor=1 - lr * weight_decay if decoupled else 1.0,
        weight_decay=0.0 if decoupled else weight_decay,
        maximize=maximize,
        with_params=params is not None,
        kernel_runs=kernel and library.are_concrete(bias_correction1, fused),
    )
    return *node.run(step, columns, inplace), bias_correction.count_up(counts, inplace=inplace)


@dataclass(slots=True, eq=False)
class _Adam(node.Step):
    b1: Factor
    b2: Factor
    eps: Factor
    eps_root: Factor
    bias_correction1: Factors
    """``1 - b1**t``."""
    bias_correction2: Factors
    """``1 - b2**t``."""
    direction_factor: float
    """The direction is multiplied by this before it is added to the parameter."""
    param_factor: float
    """The parameter is multiplied by this, which is below 1 for a decoupled weight decay."""
    weight_decay: float
    """How much of the parameter is added to its gradient."""
    maximize: bool
    with_params: bool
    kernel_runs: bool

    @property
    def is_one_node(self) -> bool:
        numbers = not any(isinstance(number, Tensor) for number in self._numbers())
        return numbers and library.are_concrete(self.bias_correction1, None)

    @property
    def is_uniform(self) -> bool:
        return not isinstance(self.bias_correction1, list) and not isinstance(self.bias_correction2, list)

    @property
    def direct_factor(self) -> float | None:
        return self.param_factor if self.with_params and self.weight_decay == 0 else None

    def at(self, places: Sequence[int]) -> _Adam:
        both = (self.bias_correction1, self.bias_correction2)
        first, second = ([x[p] for p in places] if isinstance(x, list) else x for x in both)
        return replace(self, bias_correction1=first, bias_correction2=second)

    def formula(self, columns: Columns, inplace: bool = False) -> list[list[Tensor]]:
        grads, exp_avgs, exp_avg_sqs = (column or [] for column in columns[:3])
        params = columns[3]
        grads = foreach.descent_gradients(grads, params, self.weight_decay, self.maximize)
        exp_avgs = foreach.interpolate(exp_avgs, grads, 1 - self.b1, inplace=inplace)
        exp_avg_sqs = foreach.multiply(exp_avg_sqs, self.b2, inplace=inplace)
        exp_avg_sqs = foreach.add_product(exp_avg_sqs, grads, grads, 1 - self.b2, inplace=inplace)
        below = exp_avg_sqs
        if not foreach.is_zero(self.eps_root):
            below = foreach.add_number(below, foreach.combine(_times, self.bias_correction2, self.eps_root))
        # Both sides of the fraction are multiplied by `bias_correction1`: one pass over the memory less.
        scale = foreach.combine(_over_root, self.bias_correction1, self.bias_correction2)
        eps = foreach.combine(_times, self.bias_correction1, self.eps)
        below = foreach.multiply(foreach.square_root(below), scale, inplace=inplace)
        below = foreach.add_number(below, eps, inplace=inplace)
        if params is None:
            return [foreach.divide(exp_avgs, below), exp_avgs, exp_avg_sqs]
        if self.param_factor != 1:
            params = foreach.multiply(params, self.param_factor, inplace=inplace)
        moved = foreach.add_quotient(params, exp_avgs, below, self.direction_factor, inplace=inplace)
        return [moved, exp_avgs, exp_avg_sqs]

    def kernel(self, columns: Columns) -> list[list[Tensor]]:
        lists = [column or [] for column in columns]
        return split(torch.ops.todist.adam(*lists, *self._arguments(len(lists[0]))), 3)

    def saved(self, columns: Columns) -> Columns:
        """The old averages: the new ones are rounded where the tensors are float16 or bfloat16."""
        return [*columns[:3], None if self.weight_decay == 0 else columns[3]]

    def backward_kernel(self, saved: Columns, grad_outputs: Columns) -> list[list[Tensor]]:
        inputs = [column or [] for column in saved]
        first, *rest = (column or [] for column in grad_outputs)
        first = first or [torch.zeros_like(g) for g in inputs[0]]
        made = torch.ops.todist.adam_backward(first, *rest, *inputs, *self._arguments(len(first)))
        return split(made, 3 + (self.weight_decay != 0))

    def _numbers(self) -> tuple[Factor, ...]:
        return self.b1, self.b2, self.eps, self.eps_root

    def _arguments(self, count: int) -> tuple[Any, ...]:
        """The numbers that the kernels take."""
        corrections = corrections_of(self.bias_correction1, self.bias_correction2, count)
        factors = (self.direction_factor, self.param_factor)
        return corrections, *factors, *self._numbers(), self.weight_decay, self.maximize


def corrections_of(bias_correction1: Factors, bias_correction2: Factors, count: int) -> Tensor:
    """Both bias corrections of each tensor, a row for each."""
    columns = (bias_correction1, bias_correction2)
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

    The step records no graph. It is the fused one of ``torch.optim``, where that takes the tensors and there is no
    ``eps_root``; otherwise it is :func:`adam`, whose results are written over the arguments.

    The arguments are those of :func:`adam`, all hyper-parameters numbers; counts that are numbers are the caller's to
    count.
    """
    named = {"params": params, "grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    check_lengths({**named, "steps": steps})
    counts = bias_correction.counts(steps)
    columns = [list(column) for column in named.values()]
    fused_step = None
    if eps_root == 0:
        fused_step = library.torch_fused_step("adamw" if decoupled else "adam", columns, fused)
    with torch.no_grad():
        if fused_step is not None:
            bias_correction.count_up_(counts)
            fused_step(
                *columns,
                [],
                bias_correction.on_device(counts, params[0].device),
                lr=float(lr),
                beta1=b1,
                beta2=b2,
                eps=eps,
                weight_decay=weight_decay,
                maximize=maximize,
                amsgrad=False,
            )
            torch.autograd.graph.increment_version(
                [*params, *exp_avgs, *exp_avg_sqs]
            )  # torch's step leaves versions as they are
            return
        if fused is False:
            check_tensors(named)  # before the first portion is written
        p, g, m, v = columns
        numbers = {"b1": b1, "b2": b2, "eps": eps, "eps_root": eps_root, "lr": lr, "maximize": maximize}
        decay = {"weight_decay": weight_decay, "decoupled": decoupled}
        overwrite_by(adam, g, [m, v, counts], p, fused=fused, **numbers, **decay)


class AdamOp:
    """Adam's formula for one tensor at a time, by TorchOpt's interface; :func:`~torchopt_dist.adam` takes all at once.

    Args:
        b1: decay of the average of the gradients, a number.
        b2: decay of the average of their squares.
        eps: added to the root.
        eps_root: added below the root.
        inplace: if True, may overwrite ``mu`` and ``nu`` where no graph is recorded and no kernel runs.

    Example:
        >>> import torch
        >>> zero = torch.zeros(2)
        >>> mu, nu, direction = AdamOp()(zero, zero.clone(), torch.tensor([1.0, -2.0]), 1)
        >>> direction
        tensor([ 1., -1.])
    """

    def __init__(
        self,
        b1: float = 0.9,
        b2: float = 0.999,
        eps: float = 1e-8,
        eps_root: float = 0.0,
        inplace: bool = True,
    ) -> None:
        self.b1, self.b2, self.eps, self.eps_root, self.inplace = b1, b2, eps, eps_root, inplace

    def __call__(
        self, mu: Tensor, nu: Tensor, updates: OptionalTensor, count: Tensor | int
    ) -> tuple[Tensor, Tensor, OptionalTensor]:
        """Make one step.

        Args:
            mu: average of the gradients, of the shape of ``updates``.
            nu: average of their squares, of the same shape.
            updates: the gradient; ``None`` for none, and then ``mu`` and ``nu`` stay as they are.
            count: the number of this step, from 1 on; a number, or a tensor of one element.

        Returns:
            The next ``mu``, the next ``nu``, and the direction; connected to the graph, to any order.

        Raises:
            TypeError: an argument is not a dense tensor of a floating-point dtype.
            ValueError: the shapes differ, or ``count`` is below 1.
        """
        if updates is None:
            return mu, nu, None
        for name, x in (("mu", mu), ("nu", nu), ("updates", updates)):
            if not isinstance(x, Tensor) or x.layout is not torch.strided or not x.is_floating_point():
                got = f"{x.layout}, {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
                raise TypeError(f"`{name}` must be a dense tensor of a floating-point dtype, got {got}")
        if not mu.shape == nu.shape == updates.shape:
            shapes = ", ".join(str(tuple(x.shape)) for x in (mu, nu, updates))
            raise ValueError(f"`mu`, `nu` and `updates` must have one shape, got {shapes}")
        if isinstance(count, Tensor):
            before = count.detach().to("cpu", torch.float32).reshape(()) - 1
        else:
            before = torch.tensor(count - 1, dtype=torch.float32, device="cpu")
        if (
            not foreach.runs_in_a_loop([before]) and before < 0
        ):  # in a transformation the value cannot be read
            raise ValueError(f"`count` must be at least 1, got {int(count)}")
        directions, mus, nus, _ = adam(
            [updates],
            [mu],
            [nu],
            [before],
            b1=self.b1,
            b2=self.b2,
            eps=self.eps,
            eps_root=self.eps_root,
            inplace=self.inplace and not torch.is_grad_enabled(),
        )
        return mus[0], nus[0], directions[0]
