"""A task's function → the same function as a program of torch's compiler, kept for the process.

A task whose only value with a gradient is a number, such as a loss, is one program with its gradient, which a backward
pass then only multiplies: forward and backward in one share what they compute. Others are a program with a graph, as
torch makes it, also for a caller without gradients: a task may adapt a module inside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, nn

from torchopt_dist._programs import CompileMode, Program, code_of
from torchopt_dist._torch_private import note_attributes
from torchopt_dist._types import OptionalTensor
from torchopt_dist.distributed.messages.stacked import taken_apart
from torchopt_dist.distributed.worker._sent_function import at_home
from torchopt_dist.distributed.worker._traced_tasks import (
    check_inputs,
    differentiable,
    values,
    values_and_gradients,
)

__all__ = ["LARGE", "CompiledTask"]

LARGE = 256 << 20
"""Bytes of all tasks' gradients from which on their sum is made without them."""


class _Programs(NamedTuple):
    """Those of one function."""

    values: Program
    with_gradients: Program


class CompiledTask:
    """A task's function, called through its programs."""

    def __init__(self, function: Callable[..., Any], mode: CompileMode) -> None:
        self._function, self._same = function, at_home(function)
        self._programs = _programs(code_of(function), mode)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one task."""
        leaves, _, rebuild = taken_apart((args, kwargs))
        return self.run(leaves, (), rebuild, lambda: self._function(*args, **kwargs))

    def run(
        self,
        leaves: list[Any],
        mapped: Sequence[int],
        rebuild: Callable[[Any], Any],
        otherwise: Callable[[], Any],
    ) -> Any:
        """Run all tasks at once, or one.

        Args:
            leaves: those of the tasks' arguments.
            mapped: the places of those that hold a tensor of each task, along dimension 0; none for one task.
            rebuild: leaves → arguments; called with places in place of the leaves, as the compiler cannot trace it.
            otherwise: does the same without the compiler.
        """
        places = rebuild(iter(range(len(leaves))))
        if optree.tree_leaves(places, none_is_leaf=True) != list(range(len(leaves))):
            return otherwise()  # a container that only we know
        for leaf in leaves:
            if isinstance(leaf, nn.Module):
                note_attributes(leaf)
        number = leaves[mapped[0]].shape[0] if mapped else None
        arguments = (self._same, places, leaves, mapped, number)
        inputs = differentiable(leaves)
        recorded, program = torch.is_grad_enabled(), self._programs.with_gradients

        def with_a_graph() -> Any:
            with torch.enable_grad():
                made = self._programs.values(*arguments, otherwise=lambda: _in_mode(recorded, otherwise))
            return made if recorded else optree.tree_map(_detached, made, none_is_leaf=True)

        size = sum(tensor.nbytes * (1 if place in mapped else number or 1) for place, _, tensor in inputs)
        if not inputs or size > LARGE or not (recorded or program.has_run):
            return with_a_graph()
        with torch.no_grad():
            made = program(*arguments, otherwise=lambda: (with_a_graph(), None, []))
        value, which, grads = made
        if which is None or not recorded:
            return value
        found, spec = optree.tree_flatten(value, none_is_leaf=True)
        is_loss = optree.tree_leaves(which)
        if any(is_loss):
            which_leaf = is_loss.index(True)
            is_own = [number is not None and place in mapped for place, *_ in inputs]
            connected: Any = _Loss.apply
            found[which_leaf] = connected(
                found[which_leaf], grads, is_own, *[tensor for *_, tensor in inputs]
            )
        return optree.tree_unflatten(spec, found)


class _Loss(torch.autograd.Function):
    """A loss whose gradients are known already: a backward pass multiplies them by that of the loss."""

    @staticmethod
    def forward(
        ctx: Any, loss: Tensor, grads: Sequence[OptionalTensor], is_own: list[bool], *inputs: Tensor
    ) -> Tensor:
        """``grads`` are of each input, for each task if there are several; ``is_own``: it holds one for each task."""
        ctx.inputs, ctx.is_own = inputs, is_own
        ctx.save_for_backward(*grads)
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *output_grads: Tensor) -> tuple[OptionalTensor, ...]:
        """The sum over the tasks, but for an input that has one for each."""
        found: list[OptionalTensor] = [None, None, None]
        for grad, given, is_own in zip(ctx.saved_tensors, ctx.inputs, ctx.is_own, strict=True):
            if grad is None:
                found.append(None)
                continue
            of_loss = output_grads[0].to(grad.dtype).reshape(-1)
            by_task = grad.reshape(of_loss.shape[0], -1)
            made = of_loss[:, None] * by_task if is_own else by_task.t().mv(of_loss)
            made = made.reshape(given.shape)
            if torch.is_grad_enabled():  # with `create_graph=True`
                connected: Any = _Gradient.apply
                made = connected(made, *ctx.inputs)
            found.append(made)
        return tuple(found)


class _Gradient(torch.autograd.Function):
    """A gradient that has none itself."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, *inputs: Tensor) -> Tensor:
        """The gradient, which depends on the inputs."""
        del ctx, inputs
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *output_grads: Tensor) -> Any:
        """Raise."""
        raise RuntimeError(
            "a task with compile=True has no second derivatives: leave compile=True out for them"
        )


@lru_cache(maxsize=64)
def _programs(code: Any, mode: CompileMode) -> _Programs:
    name = getattr(code, "co_qualname", None) or getattr(code, "co_name", repr(code))
    named, captured = f"the task {name!r}", mode == "reduce-overhead"
    return _Programs(
        Program(values, named),
        Program(values_and_gradients, named, check=check_inputs, warns=False, captured=captured),
    )


def _in_mode(recorded: bool, otherwise: Callable[[], Any]) -> Any:
    with torch.set_grad_enabled(recorded):
        return otherwise()


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf
