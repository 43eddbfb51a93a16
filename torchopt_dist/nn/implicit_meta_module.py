"""A module that solves for its own parameters → the same, with implicit gradients to its meta-parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchopt_dist.core.binding import bind
from torchopt_dist.core.types import LinearSolver
from torchopt_dist.diff.implicit import attach
from torchopt_dist.linear_solve._function import as_solver
from torchopt_dist.linear_solve.solver import Solver
from torchopt_dist.nn.meta_module import MetaGradientModule
from torchopt_dist.nn.stateless import lock_of, swapped
from torchopt_dist.torch_private import transforms_are_active

__all__ = ["ImplicitMetaGradientModule"]


class ImplicitMetaGradientModule(MetaGradientModule):
    """A module with a method ``solve`` that brings its parameters to where ``optimality`` is zero.

    After ``solve`` the parameters are functions of the meta-parameters, with the exact gradient of
    :func:`torchopt_dist.diff.implicit.custom_root`. So a loss that is computed with them has a gradient for the outer
    optimizer, whatever ``solve`` has done. A subclass defines ``solve``, and either ``objective`` or ``optimality``::

        class Inner(ImplicitMetaGradientModule, linear_solve=linear_solve.solve_cg(maxiter=5)):
            def __init__(self, meta_net): ...  # given: a meta-module

            def objective(self, x, y): ...  # what `solve` minimizes

            def solve(self, x, y): ...  # moves `self.parameters()`, in place perhaps; returns what it likes

    Each solve starts from the parameters' values, detached from their history. While its parameters are exchanged,
    other threads that call the module or its ``solve`` wait.

    Args:
        linear_solve: an argument of the class statement: the linear solver, as ``solve`` of
            :func:`torchopt_dist.diff.implicit.custom_root`.
    """

    linear_solve: ClassVar[Solver] = as_solver(None)

    def __init_subclass__(cls, linear_solve: LinearSolver | None = None, **kwargs: Any) -> None:
        """Replace ``solve`` by a method that also connects the parameters.

        Raises:
            TypeError: the class has ``solve``, but neither ``objective`` nor ``optimality``.
        """
        super().__init_subclass__(**kwargs)
        if linear_solve is not None:
            cls.linear_solve = as_solver(linear_solve)
        if "solve" in vars(cls):
            ours = ImplicitMetaGradientModule
            if cls.objective is ours.objective and cls.optimality is ours.optimality:
                raise TypeError(
                    f"{cls.__name__} must have a method `objective` or `optimality` beside `solve`"
                )
            cls.solve = _connecting(cls.solve)  # type: ignore[method-assign]

    def solve(self, *args: Any, **kwargs: Any) -> Any:
        """Move the parameters to where :meth:`optimality` is zero."""
        raise NotImplementedError(f"{type(self).__name__} must have a method `solve`")

    def objective(self, *args: Any, **kwargs: Any) -> Tensor:
        """The scalar that ``solve`` minimizes; it takes the arguments of ``solve``."""
        raise NotImplementedError(f"{type(self).__name__} must have a method `objective` or `optimality`")

    def optimality(self, *args: Any, **kwargs: Any) -> Sequence[Tensor]:
        """What is zero at the solution: a tensor for each parameter that requires grad, in their order and shapes.

        Unless a subclass overrides it, this is the gradient of :meth:`objective`.
        """
        named = _trainable(self)
        if transforms_are_active():

            def objective_of(tensors: dict[str, Tensor]) -> Tensor:
                with swapped(self._own_containers(), {id(named[name]): tensors[name] for name in named}):
                    return self.objective(*args, **kwargs)

            return list(torch.func.grad(objective_of)(named).values())
        with torch.enable_grad():
            loss = self.objective(*args, **kwargs)
            return torch.autograd.grad(loss, list(named.values()), create_graph=True, materialize_grads=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call :meth:`forward`, as in every module."""
        with lock_of(self):
            return super().__call__(*args, **kwargs)


def _trainable(module: ImplicitMetaGradientModule) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in module.named_parameters() if tensor.requires_grad}


def _cut(module: ImplicitMetaGradientModule) -> None:
    """Replace the last solution by leaves with their own memory: a solve in place must not write into its graph."""
    for container in module._own_containers():
        for name, tensor in container.items():
            if tensor is not None and tensor.grad_fn is not None:
                container[name] = tensor.detach().clone().requires_grad_()


def _connecting(solve: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(solve)
    def solve_and_connect(self: ImplicitMetaGradientModule, *args: Any, **kwargs: Any) -> Any:
        with lock_of(self):
            if vars(self).get("_is_solving"):  # `super().solve(…)`: the outer one connects
                return solve(self, *args, **kwargs)
            _cut(self)
            vars(self)["_is_solving"] = True
            try:
                result = solve(self, *args, **kwargs)
            finally:
                del vars(self)["_is_solving"]
            if torch.is_grad_enabled():
                _connect(self, args, kwargs)
            return result

    return solve_and_connect


def _connect(module: ImplicitMetaGradientModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    params, metas = _trainable(module), dict(module.named_meta_parameters())
    if not params or not metas:
        return
    residual = module.optimality

    def optimality(
        params: dict[str, Tensor], metas: dict[str, Tensor], args: Any, kwargs: dict[str, Any]
    ) -> dict[str, Tensor]:
        with lock_of(module):
            now = {name: tensor for name, tensor in module.named_parameters() if name in params}
            new = {id(now[name]): tensor for name, tensor in params.items()}
            new |= {id(there): metas[name] for name, there in module.named_meta_parameters() if name in metas}
            with swapped([*module._own_containers(), *module._meta_containers()], new):
                values = residual(*args, **kwargs)
        if not isinstance(values, (tuple, list)) or len(values) != len(params):
            got = len(values) if isinstance(values, (tuple, list)) else type(values).__name__
            raise ValueError(
                f"`optimality` must return a sequence of {len(params)} tensors, one for each parameter, got {got}"
            )
        return dict(zip(params, values, strict=True))

    others = [metas, list(args), kwargs]
    equation = bind(optimality)
    connected = attach(equation, params, others, {}, [0], module.linear_solve)
    new = {id(params[name]): connected[name] for name in params}
    for container in module._own_containers():
        for name, tensor in container.items():
            if id(tensor) in new:
                container[name] = new[id(tensor)]
    equation.settle()
