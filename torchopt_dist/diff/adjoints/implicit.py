"""A loop → its outcome, with the gradient of a stationary point by the implicit function theorem."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchopt_dist.arguments.numbers import integer
from torchopt_dist.core.graphs import graph_is_recorded
from torchopt_dist.core.random_turns import Turn, kept_generators
from torchopt_dist.core.surroundings import Modes, modes
from torchopt_dist.core.types import LinearSolver
from torchopt_dist.core.vjp import Tensors
from torchopt_dist.core.vmap import Samples
from torchopt_dist.diff.adjoints._checks import refuse_undeclared, watched
from torchopt_dist.diff.adjoints._declared import tensors_of_batches
from torchopt_dist.diff.adjoints._loop import Carry, Loop, Outcome
from torchopt_dist.diff.adjoints._loop_of_samples import run_outside_of_vmap, samples_for
from torchopt_dist.diff.adjoints._stationary import far_from_a_minimum, warn_of_unused
from torchopt_dist.diff.adjoints.adjoint import Adjoint
from torchopt_dist.diff.implicit import Found, attach
from torchopt_dist.formulas.attention import attention_by_formula
from torchopt_dist.linear_solve._function import as_solver
from torchopt_dist.linear_solve.cg import solve_cg
from torchopt_dist.linear_solve.solver import NotConverged, Solver, check_not_converged

__all__ = ["Implicit"]


@dataclass(frozen=True)
class Implicit(Adjoint):
    """The gradient of a stationary point of the inner loss, however it was reached (iMAML, Rajeswaran et al., 2019).

    With ``c`` the outer gradient of the last parameters ``θ`` and ``H`` the inner loss's Hessian there, the tensors
    that the loss uses get ``-(∂²loss/∂meta∂θ) H⁻¹ c``: a linear solve with products of the Hessian, which needs the
    memory of one step. If ``θ`` is only near to a stationary point of a strongly convex loss, the error is proportional
    to the distance; so it falls with the number of steps as fast as the training converges. There are derivatives of
    any order.

    The initial parameters, the initial state and hyper-parameters have no influence on such a point and get no
    gradient; so put weight decay into the loss. A tensor of ``meta`` or of the optimizer that the loss does not use
    gets none either, and a warning in the backward pass says so. Losses are not connected.

    Args:
        solver: the linear solver, from ``todist.linear_solve``, or any function ``solve(matvec, b)``;
            ``linear_solve.solve_cg()``, if not given. Where the Hessian is not positive definite, ``ridge=`` of a
            solver damps it.
        batches: the number of last batches; the point is taken to be stationary for the mean loss over these.
        not_converged: what a backward pass does if the last parameters are far from a stationary point: ``'warn'`` by a
            :class:`~torchopt_dist.linear_solve.ConvergenceWarning`, ``'raise'`` a ``torch.linalg.LinAlgError``, or
            ``'ignore'`` it. Far is where ``‖∇loss‖ ‖H⁻¹ c‖ / ‖c‖``, about the distance to that point, is more than a
            tenth of the way that the steps have gone, and more than a thousandth of the norm of ``θ``.

    Raises:
        TypeError: ``solver`` is not a function, or ``batches`` is not an integer.
        ValueError: ``batches`` is below 1, or ``not_converged`` is none of the three; or, from ``inner_loop``, the loss
            depends on a leaf that ``meta`` does not list.
        NotImplementedError: from ``inner_loop``, inside another transform of ``torch.func`` than ``vmap``.

    Example:
        >>> import torch, torchopt_dist as todist
        >>> w, x = torch.tensor(1.0, requires_grad=True), torch.tensor(3.0, requires_grad=True)
        >>> adapted = todist.inner_loop(
        ...     lambda w: (w - x) ** 2, todist.sgd(lr=0.25), w, 20, meta=x, adjoint=Implicit()
        ... )
        >>> torch.autograd.grad(adapted.params, x)  # the minimum is at x
        (tensor(1.),)
    """

    first_has_gradient: ClassVar[bool] = False

    solver: LinearSolver | None = None
    batches: int = 1
    not_converged: NotConverged = "warn"

    def __post_init__(self) -> None:
        as_solver(self.solver)
        integer("batches", self.batches, 1)
        check_not_converged(self.not_converged)

    @property
    def batches_again(self) -> int:
        """The point is stationary on the last batches."""
        return self.batches

    def run(self, loop: Loop) -> Outcome:
        """Run the loop; see :meth:`Adjoint.run`."""
        around = samples_for(self)
        of_batches = {id(held.values) for held in around.values(tensors_of_batches(loop.batches))}
        if self.solver is None or isinstance(self.solver, Solver):
            return run_outside_of_vmap(partial(self._run, of_batches, Samples()), loop, around)
        return self._run(of_batches, around, loop)  # a function solves one system, that of a sample

    def _run(self, of_batches: set[int], around: Samples, loop: Loop) -> Outcome:
        seen = watched(loop, around)

        def step(carry: Carry, number: int) -> tuple[Carry, Tensor, Any]:
            return (seen if number == 0 else loop).training_step(carry, number)

        outcome = loop.run(step, loop.own(loop.first))
        count = len(outcome.losses)
        if count == 0:
            return outcome
        gradient = _Gradient(loop, outcome.carry, range(max(0, count - self.batches), count), modes())
        places = loop.model.moved_places
        solver = solve_cg() if self.solver is None else as_solver(self.solver)
        point = [outcome.carry.params[place] for place in places]
        declared = list(loop.declared)
        with torch.enable_grad():
            if loop.is_substituted:  # a view is of what a loop around this one has put in the places of these
                declared = [tensor.view_as(tensor) for tensor in declared]
            first = [loop.first.params[place] for place in places]
            look = partial(self._look, loop, of_batches)
            connected = attach(gradient, point, [declared, first], {}, [0], solver, look, loop.samples)
        return outcome.with_moved(loop.model, connected)

    def _look(self, loop: Loop, of_batches: set[int], found: Found) -> None:
        unused = [loop.declared[place] for place in found.unused]
        warn_of_unused([tensor for tensor in unused if id(tensor) not in of_batches])
        far_from_a_minimum(found, found.others[1], self.not_converged, len(loop.samples))


@dataclass(frozen=True)
class _Gradient:
    """Parameters, declared tensors → the gradient of the mean loss over some batches."""

    loop: Loop
    last: Carry
    numbers: range
    modes: Modes

    def __call__(self, point: Tensors, declared: Tensors, first: Tensors) -> Any:
        places = self.loop.model.moved_places
        loop = replace(self.loop, others=tuple(declared))
        params = list(self.last.params)
        for place, leaf in zip(places, point, strict=True):
            params[place] = leaf
        carry = self.last._replace(params=[params[place] for place in loop.model.first_places])
        total = [torch.zeros_like(leaf) for leaf in point]
        with loop.failing(), kept_generators(), self.modes.again(), attention_by_formula():
            for number in self.numbers:
                found = loop.gradient(carry, number, record=True)
                if graph_is_recorded():
                    again = partial(self._loss, loop, carry, number)
                    refuse_undeclared([found.loss], [*carry.params, *declared], again)
                grads = [found.grads[place] for place in places]
                total = [t if g is None else t + g for t, g in zip(total, grads, strict=True)]
        return [t / len(self.numbers) for t in total]

    def _loss(self, loop: Loop, carry: Carry, number: int) -> Tensors:
        with Turn(exclusive=True):
            return loop.loss_again(carry, number)
