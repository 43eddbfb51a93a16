"""A task's function → the same function as a program of torch's compiler, kept for the process.

A task whose only value with a gradient is a number, such as a loss, is one program with its gradient, which a backward
pass then only multiplies: forward and backward in one share what they compute. Others are a program with a graph, as
torch makes it, also for a caller without gradients: a task may adapt a module inside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import optree
import torch
from torch import Tensor, nn

from torchopt_dist.core.meaning import RefusedError
from torchopt_dist.core.programs import CompileMode, Variant, code_of, detached, plain_number, programs_of
from torchopt_dist.core.reached import name_of
from torchopt_dist.core.second_order import with_refusal
from torchopt_dist.core.types import OptionalTensor
from torchopt_dist.core.vmap import same_values
from torchopt_dist.distributed.messages.stacked import taken_apart
from torchopt_dist.distributed.worker._traced_tasks import (
    Slot,
    Task,
    check_inputs,
    differentiable,
    values,
    values_and_gradients,
)
from torchopt_dist.distributed.worker.buffers import Place, Returning, buffers_in
from torchopt_dist.formulas.traced import with_formulas
from torchopt_dist.nn._traced_module import note_attributes

__all__ = ["LARGE", "CompiledTask"]

LARGE = 256 << 20
"""Bytes of all tasks' gradients from which on their sum is made without them."""
_NOT_TWICE = "a task with compile=True has no second derivatives: leave compile=True out for them"


class CompiledTask:
    """A task's function, called through its programs."""

    def __init__(self, function: Callable[..., Any], mode: CompileMode) -> None:
        self._returns_buffers = isinstance(function, Returning)
        self._function = function.func if isinstance(function, Returning) else function
        self._programs = programs_of(code_of(function), f"the task {name_of(self._function)!r}", mode)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one task."""
        leaves, _, rebuild = taken_apart((args, kwargs))
        function = Returning(self._function) if self._returns_buffers else self._function
        return self.run(leaves, (), rebuild, lambda: function(*args, **kwargs))

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
        spec = optree.tree_structure(places, none_is_leaf=True)

        def run(variant: Variant, function: Any, *leaves: Any) -> Any:
            if variant.first.alias:  # in a copy of the module it would be the module's own
                raise RefusedError(
                    f"{variant.first.alias} is also a parameter, buffer or sub-module: hold it "
                    "in one place, or in a torch.nn.ModuleList"
                )
            slots, buffers = self._buffers_of(leaves, mapped, rebuild)
            tensors = [buffer.tensor.detach() for buffer in buffers]
            number = leaves[mapped[0]].shape[0] if mapped else None
            value, made = _run(variant, Task(function, places, list(leaves), mapped, number, slots, tensors))
            if not self._returns_buffers:
                return value
            changed = zip(buffers, made, strict=True)
            return value, {old.key: new for old, new in changed if not same_values(old.tensor, new)}

        things = (
            ("the function", self._function),
            *zip(_names(spec), map(plain_number, leaves), strict=True),
        )
        return self._programs.run(things, run, otherwise, (spec, tuple(mapped)))

    def _buffers_of(
        self, leaves: Sequence[Any], mapped: Sequence[int], rebuild: Callable[[Any], Any]
    ) -> tuple[list[Slot], list[Place]]:
        """Where the buffers are that the function returns, and themselves."""
        if not self._returns_buffers:
            return [], []
        if mapped:
            raise RefusedError("`buffers` is given and the tasks are one `vmap`: leave vectorize=True out")
        holders: dict[int, list[tuple[int, int]]] = {}
        for place, leaf in enumerate(leaves):
            for number, part in enumerate(leaf.modules() if isinstance(leaf, nn.Module) else ()):
                holders.setdefault(id(part), []).append((place, number))
        args, kwargs = rebuild(iter(leaves))
        buffers, first = list(buffers_in(self._function, args, kwargs)), dict[int, int]()
        slots: list[Slot] = []
        for number, buffer in enumerate(buffers):
            found = holders.get(id(buffer.owner), ())
            same = first.setdefault(id(buffer.tensor), number)
            if len(found) != 1 or (slots and same < number and slots[same].leaf != found[0][0]):
                raise RefusedError(f"the buffer `{buffer.key[1]}` is not one of exactly one argument")
            slots.append(Slot(*found[0], buffer.name, same))
        return slots, buffers


def _run(variant: Variant, task: Task) -> tuple[Any, list[Tensor]]:
    """What the tasks return, and their buffers after them."""
    leaves, mapped, number = task.leaves, task.mapped, task.number
    for leaf in leaves:
        if isinstance(leaf, nn.Module):
            note_attributes(leaf)
    inputs = differentiable(leaves)
    recorded, program = torch.is_grad_enabled(), variant.program(values_and_gradients, check_inputs)
    size = sum(tensor.nbytes * (1 if place in mapped else number or 1) for place, _, tensor in inputs)
    if not inputs or size > LARGE or not (recorded or program.has_run):
        return _with_a_graph(variant, task)
    try:
        with torch.no_grad():
            value, buffers, which, grads = program(task)
    except RefusedError:
        return _with_a_graph(variant, task)
    if not recorded:
        return value, buffers
    found, spec = optree.tree_flatten(value, none_is_leaf=True)
    is_loss = optree.tree_leaves(which)
    if any(is_loss):
        which_leaf = is_loss.index(True)
        is_own = [number is not None and place in mapped for place, *_ in inputs]
        connected: Any = _Loss.apply
        found[which_leaf] = connected(found[which_leaf], grads, is_own, *[tensor for *_, tensor in inputs])
    return optree.tree_unflatten(spec, found), buffers


def _with_a_graph(variant: Variant, task: Task) -> tuple[Any, list[Tensor]]:
    recorded = torch.is_grad_enabled()
    with torch.enable_grad():
        made, buffers = variant.program(values, with_formulas)(task)
    return made if recorded else detached(made), buffers


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
                found += with_refusal([made], ctx.inputs, _NOT_TWICE)
            else:
                found.append(made)
        return tuple(found)


@lru_cache(maxsize=64)
def _names(spec: Any) -> list[str]:
    """What messages call each argument, of those of a structure."""
    found = (accessor.codify("") for accessor in spec.accessors())
    return [f"{'kwargs' if name.startswith('[1]') else 'args'}{name[3:]}" for name in found]
