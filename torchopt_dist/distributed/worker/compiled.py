"""A task's function → the same function as a program of torch's compiler, kept for the process.

The program computes with gradients, also for a caller without: a task may adapt a module inside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import optree
import torch
from torch import Tensor

from torchopt_dist._formulas.traced import TracedNormalization
from torchopt_dist._programs import Program, code_of
from torchopt_dist.distributed.worker._sent_function import at_home

__all__ = ["compiled", "compiled_vmap"]


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, called through its program."""
    program, same = _program(_task, code_of(function)), at_home(function)

    def call(*args: Any, **kwargs: Any) -> Any:
        return _called(program, (same, args, kwargs), lambda: function(*args, **kwargs))

    return call


def compiled_vmap(
    function: Callable[..., Any], leaves: list[Any], mapped: Sequence[int], rebuild: Callable[[Any], Any]
) -> Callable[..., Any] | None:
    """All tasks at once, as a function of the tensors that are mapped; ``None`` if they cannot be one program.

    Args:
        function: the task's function.
        leaves: the leaves of one task's arguments.
        mapped: the places of those that differ between the tasks.
        rebuild: leaves → arguments; called with places in place of the leaves, since the compiler cannot trace it.
    """
    places = rebuild(iter(range(len(leaves))))
    if optree.tree_leaves(places, none_is_leaf=True) != list(range(len(leaves))):
        return None  # a container that only we know
    shared = [None if place in mapped else leaf for place, leaf in enumerate(leaves)]
    program, same = _program(_tasks, code_of(function)), at_home(function)
    return lambda otherwise, *tensors: _called(program, (same, places, shared, mapped, tensors), otherwise)


def _called(program: Program, arguments: tuple[Any, ...], otherwise: Callable[[], Any]) -> Any:
    if torch.is_grad_enabled():
        return program(*arguments, otherwise=otherwise)
    with torch.enable_grad():
        made = program(*arguments, otherwise=lambda: _in_its_mode(otherwise))
    return optree.tree_map(_detached, made, none_is_leaf=True)


def _task(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


def _tasks(
    function: Callable[..., Any],
    places: Any,
    shared: list[Any],
    mapped: Sequence[int],
    tensors: tuple[Tensor, ...],
) -> Any:
    def one_task(*own: Tensor) -> Any:
        leaves = list(shared)
        for place, tensor in zip(mapped, own, strict=True):
            leaves[place] = tensor
        args, kwargs = optree.tree_map(lambda place: leaves[place], places)
        return function(*args, **kwargs)

    with TracedNormalization():
        return torch.func.vmap(one_task, randomness="different")(*tensors)


@lru_cache(maxsize=64)
def _program(run: Callable[..., Any], code: Any) -> Program:
    name = getattr(code, "co_qualname", None) or getattr(code, "co_name", repr(code))
    return Program(run, f"the task {name!r}")


def _in_its_mode(otherwise: Callable[[], Any]) -> Any:
    with torch.no_grad():
        return otherwise()


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf
