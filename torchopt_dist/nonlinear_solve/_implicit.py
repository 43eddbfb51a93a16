"""A solution, the function that it solves → the solution connected to the tensors that the function takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchopt_dist import pytree
from torchopt_dist.core.bound import Bound
from torchopt_dist.core.substitution import StandIns, Substitute, Watch
from torchopt_dist.core.types import TensorTree
from torchopt_dist.diff.implicit import attach
from torchopt_dist.linear_solve.solver import Solver
from torchopt_dist.torch_private import transforms_are_active

__all__ = ["connected"]


def connected(function: Bound, solution: TensorTree, *, for_root: bool, solver: Solver) -> Any:
    """Connect a solution of ``x = function(x)``, or of ``function(x) = 0``, to the tensors that the function takes.

    Args:
        function: the function, whose names are bound.
        solution: a tree of tensors.
        for_root: which of the equations it solves.
        solver: solves with the transposed Jacobian in a backward pass.

    Raises:
        ValueError: the function differentiates a graph from outside, so that nothing else can stand for its tensors.
    """
    found = _taken(function, solution)
    if not found:
        return solution

    def residual(x: TensorTree, others: list[Tensor]) -> TensorTree:
        with Substitute(found, others):
            value = function(x)
        return value if for_root else pytree.tree_sub(x, value)

    function.settle()
    return attach(residual, solution, [found], {}, [0], solver)


def _taken(function: Callable[..., Any], solution: TensorTree) -> list[Tensor]:
    """The tensors from outside that the function takes, and that may get a gradient."""
    leaves, spec = pytree.flatten(solution)
    outside = list(getattr(function, "tensors", ()))
    given = [leaf.detach() for leaf in leaves]
    with torch.enable_grad():
        if transforms_are_active():
            seen = Watch(given, outside)
            with seen:
                function(pytree.unflatten(spec, given))
            return [tensor for tensor in seen.found if tensor.is_floating_point() or tensor.is_complex()]
        trial = StandIns(given, outside)
        with trial:
            function(pytree.unflatten(spec, given))
    if trial.follows_graph:
        raise ValueError(
            "`function` must not differentiate what was computed before the solver's call, since the solution's "
            "gradient is taken by the equation, with other tensors in these places: compute that inside of "
            "`function`, or give the solver `unroll=True`"
        )
    return trial.found
