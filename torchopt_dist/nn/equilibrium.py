"""A cell, ``z = cell(z, x)`` → a layer that gives the fixed point, with the gradient of that equation.

Bai et al., "Deep equilibrium models", 2019.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torchopt_dist import pytree
from torchopt_dist.core.types import LinearSolver, TensorTree
from torchopt_dist.nonlinear_solve.anderson import anderson
from torchopt_dist.nonlinear_solve.solver import NonlinearSolver, NonlinearSolverInfo

__all__ = ["Equilibrium"]


class Equilibrium(nn.Module):
    """A layer of infinite depth: its output is the ``z`` that a cell does not change, ``z = cell(z, x)``.

    The gradient is that of the equation, to any order, with regard to the cell's parameters, to ``x`` and to whatever
    else the cell uses. So memory does not grow with the iterations. A solver that has not converged warns, forward as
    well as backward, if its ``not_converged`` does not say otherwise; inside ``vmap`` none can, and ``info`` tells.

    The layer keeps nothing from a call. To start near the solution, give that of an earlier call as ``start``.

    Args:
        cell: a module or function: the fixed point, and the layer's arguments → a tree like the fixed point. It must be
            the same function in every iteration, so without dropout, and a fixed point must exist: for example because
            the cell is a contraction.
        solver: one of ``todist.nonlinear_solve``; ``anderson()``, if not given. With ``unroll=True`` the gradient goes
            through its iterations instead.
        backward: solves the linear system of the gradient: one of ``todist.linear_solve``, such as ``solve_gmres()``,
            or any function ``solve(matvec, b)``; if not given, the solver's own ``solve``.
        init: the layer's arguments → where to start; zeros like the first argument, if not given.

    Raises:
        TypeError: ``cell`` or ``init`` cannot be called, or ``solver`` is none of ``todist.nonlinear_solve``.
        ValueError: ``backward`` is given, and the solver has a ``solve``, too, or unrolls.

    Example:
        >>> import torch, torchopt_dist as todist
        >>> cell = lambda z, x: 0.5 * torch.cos(z) + x
        >>> layer = todist.nn.Equilibrium(cell, todist.nonlinear_solve.anderson(rtol=1e-6))
        >>> z, info = layer.with_info(torch.tensor([0.1, 0.2]))
        >>> bool(info.converged), torch.allclose(z, cell(z, torch.tensor([0.1, 0.2])), atol=1e-5)
        (True, True)
    """

    def __init__(
        self,
        cell: Callable[..., TensorTree],
        solver: NonlinearSolver | None = None,
        backward: LinearSolver | None = None,
        *,
        init: Callable[..., TensorTree] | None = None,
    ) -> None:
        super().__init__()
        if not callable(cell):
            raise TypeError(f"`cell` must be a module or a function, got {type(cell).__name__}")
        if init is not None and not callable(init):
            raise TypeError(
                f"`init` must be a function of the layer's arguments, got {type(init).__name__}: write "
                "init=lambda x: x.new_zeros(len(x), 64), or give the call `start=`"
            )
        solver = anderson() if solver is None else solver
        if not isinstance(solver, NonlinearSolver):
            raise TypeError(
                f"`solver` must be one of todist.nonlinear_solve, such as anderson(), got {type(solver).__name__}"
            )
        if backward is not None:
            if solver.solve is not None or solver.unroll:
                has = "unroll=True" if solver.unroll else "a `solve`"
                raise ValueError(
                    f"`backward` must be left out, since the solver has {has}: give one of the two"
                )
            solver = dataclasses.replace(solver, solve=backward)
        self.cell = cell
        self.solver = solver
        self.init = init

    def forward(self, *args: Any, start: TensorTree = None) -> Any:
        """The fixed point; see :meth:`with_info`."""
        return self.with_info(*args, start=start)[0]

    def with_info(self, *args: Any, start: TensorTree = None) -> tuple[Any, NonlinearSolverInfo]:
        """Solve.

        Args:
            *args: what the cell takes beside the fixed point.
            start: where to begin, for example the solution of an earlier call; ``init`` of the arguments, if not given.

        Returns:
            The fixed point, and the residual, iterations and convergence of both solvers: ``info.residual``, … of this
            call, and ``info.backward``, a list that each backward pass through it makes longer by one.

        Raises:
            TypeError: there is no argument to begin with zeros like it.
            torch.linalg.LinAlgError: as ``solver.with_info``.
            ValueError: as ``solver.with_info``.
        """
        if start is None and self.init is None and not args:
            raise TypeError(
                "Equilibrium must have an argument, whose shape the fixed point has, or `init=`, or `start=`; got none"
            )
        with torch.no_grad():  # where it starts moves no solution
            if start is None:
                start = pytree.tree_map(torch.zeros_like, args[0]) if self.init is None else self.init(*args)
            start = pytree.map_tensors(torch.Tensor.detach, start)
        cell, for_root = self.cell, self.solver.solves_for_root

        def function(z: TensorTree) -> TensorTree:
            value = cell(z, *args)
            return pytree.tree_sub(value, z) if for_root else value

        return self.solver.with_info(function, start)

    def extra_repr(self) -> str:
        """The solver."""
        return f"solver={self.solver!r}"
