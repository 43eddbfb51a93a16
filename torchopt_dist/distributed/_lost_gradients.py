"""A call's results and inputs → gradients that the caller does not get: of other leaves, and of inputs without a path.

A function that is sent by its name uses the worker's own global variables, and those that go with the code of a
function are the worker's own, too. The graph of a call ends at the other tensors of its message, so a global model's
parameters get no gradient from it. An inner loop may have an adjoint that gives none
to what its loss uses.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any

import optree
import torch
from torch import Tensor, nn

from torchopt_dist._functional import replaced
from torchopt_dist._unconnected import Unconnected, unconnected

__all__ = ["Watched", "code_of", "description_of_losses", "tensors_in", "watched"]


@dataclass
class Watched:
    """What was seen while a function ran."""

    made: set[int] = field(default_factory=set)
    """The ids of the parameters that were made, as long as they live."""
    unconnected: list[Unconnected] = field(default_factory=list)
    """Tensors to which the results of inner loops are not connected."""


def code_of(function: Callable[..., Any]) -> object:
    """The code of a function, which is the same in all calls, even if each call rebuilds the function."""
    if type(function) is FunctionType:
        return function.__code__
    if isinstance(function, functools.partial):
        code = code_of(function.func)
        return code if type(function) is functools.partial else (type(function), code)
    if isinstance(function, nn.Module):
        return type(function)
    function = getattr(function, "__func__", function)
    return getattr(function, "__code__", type(function))


@contextmanager
def watched() -> Iterator[Watched]:
    """A context that yields what is seen of this thread in it."""
    made: set[int] = set()

    def note(torchs: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        parameter = torchs(*args, **kwargs)
        made.add(id(parameter))
        return parameter

    parameters = replaced(nn.Parameter, {"__new__": note})
    with parameters, replaced(nn.UninitializedParameter, {"__new__": note}), unconnected() as noted:
        yield Watched(made, noted)


def description_of_losses(
    function: Callable[..., Any],
    results: list[Any],
    inputs: Sequence[Tensor],
    seen: Watched,
    apart: Sequence[Tensor] = (),
) -> tuple[str | None, bool]:
    """Describe the leaves on which the results depend and that the caller does not know, and inputs that get nothing.

    Leaves that the function has made itself do not count, unless a global variable has them now.

    Args:
        function: the function that was called.
        results: what it has returned.
        inputs: the tensors among its arguments.
        seen: what was seen meanwhile.
        apart: leaves that global variables hold that came with the code of functions.

    Returns:
        A sentence with what is lost and the remedy, or ``None`` if nothing is lost; and whether that is all that can be
        said. If not, a parameter that the function has made is held by something, such as the graph of an inner loop,
        or a cache, from which the next call takes it.
    """
    tree: Any = results
    returned: list[Any] = optree.tree_leaves(tree)
    outputs = [leaf for leaf in returned if isinstance(leaf, Tensor)]
    parts = [tensor for leaf in returned if isinstance(leaf, nn.Module) for tensor in leaf.parameters()]
    leaves = _leaves_below(outputs)
    name = f"`{getattr(function, '__qualname__', type(function).__qualname__)}`"
    silent = _silent(name, seen.unconnected, [*leaves, *outputs], inputs) if leaves else None
    known = {id(tensor) for tensor in (*inputs, *outputs, *parts)}
    leaves = [leaf for leaf in leaves if id(leaf) not in known]
    if not leaves:
        return silent, True
    names: dict[int, str] = {}
    for path, tensor in _globals_of(function, set()):
        names.setdefault(id(tensor), path)
    lost = [names[id(leaf)] for leaf in leaves if id(leaf) in names]
    brought = {id(leaf) for leaf in apart}
    lost += [
        f"a tensor of shape {tuple(leaf.shape)} in a global variable"
        for leaf in leaves
        if id(leaf) in brought - names.keys()
    ]
    brought |= names.keys()
    leaves = [leaf for leaf in leaves if id(leaf) not in brought and isinstance(leaf, nn.Parameter)]
    parts_held = [(tuple(leaf.shape), id(leaf) in seen.made) for leaf in leaves]
    held = [part for part, is_held in zip(parts_held, _held(leaves), strict=True) if is_held]
    lost += [f"a parameter of shape {shape} that the worker holds" for shape, is_new in held if not is_new]
    if not lost:
        return silent, not held
    listed = ", ".join(lost[:5]) + (f" and {len(lost) - 5} more" if len(lost) > 5 else "")
    return (
        f"{name} uses what is not among its arguments: {listed}. The gradients of these do not come back from a "
        "worker: pass the module or the tensors as arguments"
    ), True


def _silent(
    name: str, noted: Sequence[Unconnected], reached: Sequence[Tensor], inputs: Sequence[Tensor]
) -> str | None:
    """A sentence about the first input that an inner loop uses, and that results with a graph do not depend on."""
    for tensors, why in noted:
        for tensor in tensors:
            behind = {id(leaf) for leaf in ([tensor] if tensor.is_leaf else _leaves_below([tensor]))}
            if not behind.isdisjoint(map(id, inputs)) and behind.isdisjoint(map(id, reached)):
                return f"{name} returns what has no path to a tensor of shape {tuple(tensor.shape)}: {why}"
    return None


def _held(leaves: list[Tensor]) -> list[bool]:
    """For each leaf of the list, which is emptied, whether anything but its graph holds it."""
    made = nn.Parameter(torch.zeros((), device="cpu")) * 1
    leaves.extend(_leaves_below([made]))
    counts = []
    while leaves:
        leaf = leaves.pop()
        counts.append(sys.getrefcount(leaf))
    return [count > counts[0] for count in counts[:0:-1]]


def _leaves_below(outputs: Sequence[Tensor]) -> list[Tensor]:
    waiting = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    seen, leaves = set(waiting), []
    while waiting:
        node = waiting.pop()
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            leaves.append(variable)
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                waiting.append(below)
    return leaves


def _globals_of(function: Any, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    """The tensors, with their names, in global variables that a function and the functions that it calls mention."""
    if isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, nn.Module):
        function = type(function).forward
    function = getattr(function, "__func__", function)
    if not isinstance(function, FunctionType) or id(function) in seen or _is_torchs(function):
        return
    seen.add(id(function))
    for name in dict.fromkeys(_names_in(function.__code__)):
        if name in function.__globals__:
            value = function.__globals__[name]
            yield from tensors_in(name, value)
            yield from _globals_of(value, seen)


def _is_torchs(function: FunctionType) -> bool:
    return (function.__module__ or "").partition(".")[0] in ("torch", "torchopt_dist")


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def tensors_in(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """The parameters of a module, or the tensors in a tree, each with its expression."""
    if isinstance(value, nn.Module):
        yield from ((f"{name}.{inner}", parameter) for inner, parameter in value.named_parameters())
    elif isinstance(value, (Tensor, dict, list, tuple)):
        tree: Any = value
        accessors, leaves, _ = optree.tree_flatten_with_accessor(tree)
        for accessor, leaf in zip(accessors, leaves, strict=True):
            if isinstance(leaf, Tensor):
                yield accessor.codify(name), leaf
            elif isinstance(leaf, nn.Module):
                yield from tensors_in(accessor.codify(name), leaf)
