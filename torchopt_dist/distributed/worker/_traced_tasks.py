"""A function and its arguments → its values, and the gradients of a loss with them, as the compiler can trace it.

Arguments come as leaves, and with a tree of their places. The leaves at the places that are ``mapped`` hold a tensor of
each task along dimension 0; all others are the same for all tasks. ``number`` is that of the tasks in one ``vmap``, or
``None`` for one task without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, nn

from torchopt_dist.core.programs import detached
from torchopt_dist.core.types import OptionalTensor, TensorContainer
from torchopt_dist.core.vjp import leaf_like
from torchopt_dist.formulas.traced import TracedFormulas, with_formulas
from torchopt_dist.nn._traced_module import replace_parameters, traced_copy
from torchopt_dist.torch_private import buffers_of

__all__ = ["Slot", "Task", "check_inputs", "differentiable", "values", "values_and_gradients"]

_CONSTANTS = (bool, int, float, complex, str, bytes, type(None))


class Slot(NamedTuple):
    """Where a buffer is that a task returns."""

    leaf: int
    part: int
    """The number of the module that has it, among all below the leaf."""
    name: str
    first: int
    """The number of the first slot of the same tensor."""


class Task(NamedTuple):
    """A function and its arguments."""

    function: Callable[..., Any]
    places: Any
    leaves: list[Any]
    mapped: Sequence[int]
    number: int | None
    slots: list[Slot]
    buffers: list[Tensor]
    """What is in the slots first."""


def values(task: Task) -> tuple[Any, list[Tensor]]:
    """What the tasks return, and what is in the slots of buffers after one."""
    return _made(task, list(task.leaves), {})


def differentiable(leaves: Sequence[Any]) -> list[tuple[int, str, Tensor]]:
    """Of each tensor that wants a gradient the place, its name in a module or nothing, and itself."""
    found = []
    for place, leaf in enumerate(leaves):
        named = [("", leaf)] if isinstance(leaf, Tensor) else []
        if isinstance(leaf, nn.Module):
            named = list(leaf.named_parameters())
        found += [(place, name, tensor) for name, tensor in named if tensor.requires_grad]
    return found


def values_and_gradients(task: Task) -> tuple[Any, list[Tensor], Any, Sequence[OptionalTensor]]:
    """As :func:`values`, detached; a tree that says which leaf of a value is the loss; each task's gradients of it.

    The gradients are with respect to :func:`differentiable` leaves, and stacked if the tasks are; ``None`` for a leaf
    that the loss does not depend on. Raises :class:`NotImplementedError` if what has a gradient is not one number a
    task, or could not be found.
    """
    with torch.enable_grad():
        leaves, number = task.leaves, task.number
        filled, wanted = list(leaves), []
        by_module: dict[int, dict[str, Tensor]] = {}
        for place, name, tensor in differentiable(leaves):
            own = tensor.detach()
            if number is not None and place not in task.mapped:
                own = own.expand(number, *own.shape)
            wanted.append(leaf_like(own))
            if isinstance(leaves[place], nn.Module):
                by_module.setdefault(place, {})[name] = wanted[-1]
            else:
                filled[place] = wanted[-1]

        made, after = _made(task, filled, by_module)
        found: list[Any] = []
        optree.tree_map(found.append, made, none_is_leaf=True)
        if not all(isinstance(leaf, (Tensor, *_CONSTANTS)) for leaf in found):
            raise NotImplementedError("a value may hold a tensor")
        losses = [leaf for leaf in found if _has_gradient(leaf)]
        if len(losses) > 1 or any(loss.numel() != (number or 1) for loss in losses):
            raise NotImplementedError("not one number a task has a gradient")
        grads: Sequence[OptionalTensor] = []
        if losses:
            grads = torch.autograd.grad(losses[0].sum(), wanted, allow_unused=True)
    which = optree.tree_map(_has_gradient, made, none_is_leaf=True)
    return detached(made), after, which, grads


def _made(task: Task, filled: list[Any], by_module: dict[int, dict[str, Tensor]]) -> tuple[Any, list[Tensor]]:
    """As :func:`values`, with other leaves, and with other tensors in the modules among them."""
    leaves = task.leaves

    def one_task(modules: dict[int, dict[str, Tensor]], own: list[Any]) -> Any:
        given = list(leaves)
        for place, tensor in zip(own_places, own, strict=True):
            given[place] = tensor
        for place, leaf in enumerate(leaves):
            if place in modules or any(slot.leaf == place for slot in task.slots):
                given[place] = traced_copy(leaf, "reference")
        for place, tensors in modules.items():
            named = dict(leaves[place].named_parameters())
            replace_parameters(given[place], {named[name]: tensor for name, tensor in tensors.items()})
        return _with_buffers(task, given)

    own_places = [
        place for place in range(len(leaves)) if filled[place] is not leaves[place] or place in task.mapped
    ]
    own = [filled[place] for place in own_places]
    with TracedFormulas(in_transform=task.number is not None):
        if task.number is None:
            return one_task(by_module, own)
        return torch.func.vmap(one_task, randomness="different")(by_module, own)


def check_inputs(graph: Any) -> None:
    """As :func:`with_formulas`; raise for a graph of :func:`values_and_gradients` whose function has another input.

    Of its own arguments a program takes the values only; another tensor that wants a gradient is one that the function
    closes over.

    Raises:
        NotImplementedError: it has one.
    """
    with_formulas(graph)
    for node in graph.graph.find_nodes(op="placeholder"):
        value = node.meta.get("example_value")
        wants = isinstance(value, Tensor) and value.requires_grad
        if wants and any(user.target != "detach" for user in node.users):
            raise NotImplementedError("the function closes over a tensor that wants a gradient")


def _with_buffers(task: Task, leaves: Sequence[Any]) -> tuple[Any, list[Tensor]]:
    """Call a function on modules that are copies, with buffers of their own; its value, and these buffers then."""
    own: list[Tensor] = []
    holders: list[TensorContainer] = []
    for slot, tensor in zip(task.slots, task.buffers, strict=True):
        own.append(tensor.clone() if slot.first == len(own) else own[slot.first])
        holders.append(buffers_of([*leaves[slot.leaf].modules()][slot.part]))
        holders[-1][slot.name] = own[-1]
    args, kwargs = optree.tree_map(lambda place: leaves[place], task.places)
    value = task.function(*args, **kwargs)
    after: list[Tensor] = []
    for holder, slot in zip(holders, task.slots, strict=True):
        now = holder[slot.name]
        assert now is not None
        after.append(now.detach())
    return value, after


def _has_gradient(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad
