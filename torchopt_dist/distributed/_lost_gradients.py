"""A call's results and inputs → other leaves on which the results depend, whose gradients the caller does not get.

A function that is sent by its name uses the worker's own global variables. The graph of a call ends at the tensors of
its message, so a global model's parameters get no gradient from it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any

import optree
import torch
from torch import Tensor, nn

from torchopt_dist._functional import replaced

__all__ = ["code_of", "description_of_losses", "parameters_made"]


def code_of(function: Callable[..., Any]) -> object:
    """The code of a function, which is the same in all calls, even if each call rebuilds the function."""
    if type(function) is FunctionType:
        return function.__code__
    if isinstance(function, functools.partial):
        return code_of(function.func)
    if isinstance(function, nn.Module):
        return type(function)
    function = getattr(function, "__func__", function)
    return getattr(function, "__code__", type(function))


@contextmanager
def parameters_made() -> Iterator[set[int]]:
    """A context that yields the ids of the parameters that this thread makes in it, by which they can be told later."""
    made: set[int] = set()

    def note(torchs: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        parameter = torchs(*args, **kwargs)
        made.add(id(parameter))
        return parameter

    with replaced(nn.Parameter, {"__new__": note}), replaced(nn.UninitializedParameter, {"__new__": note}):
        yield made


def description_of_losses(
    function: Callable[..., Any], results: list[Any], inputs: Sequence[Tensor], made: Collection[int] = ()
) -> tuple[str | None, bool]:
    """Describe the leaves on which the results depend and that the caller does not know.

    Leaves that the function has made itself do not count, unless a global variable has them now.

    Args:
        function: the function that was called.
        results: what it has returned.
        inputs: the tensors among its arguments.
        made: the ids of the parameters that were made meanwhile.

    Returns:
        A sentence with what is lost and the remedy, or ``None`` if nothing is lost; and whether that is all that can be
        said. If not, a parameter that the function has made is held by something, such as the graph of an inner loop,
        or a cache, from which the next call takes it.
    """
    tree: Any = results
    returned: list[Any] = optree.tree_leaves(tree)
    outputs = [leaf for leaf in returned if isinstance(leaf, Tensor)]
    parts = [tensor for leaf in returned if isinstance(leaf, nn.Module) for tensor in leaf.parameters()]
    leaves = _leaves_below(outputs, {id(tensor) for tensor in (*inputs, *outputs, *parts)})
    if not leaves:
        return None, True
    names: dict[int, str] = {}
    for name, tensor in _globals_of(function, set()):
        names.setdefault(id(tensor), name)
    lost = [names[id(leaf)] for leaf in leaves if id(leaf) in names]
    leaves = [leaf for leaf in leaves if id(leaf) not in names and isinstance(leaf, nn.Parameter)]
    parts_held = [(tuple(leaf.shape), id(leaf) in made) for leaf in leaves]
    held = [part for part, is_held in zip(parts_held, _held(leaves), strict=True) if is_held]
    lost += [f"a parameter of shape {shape} that the worker holds" for shape, is_new in held if not is_new]
    if not lost:
        return None, not held
    listed = ", ".join(lost[:5]) + (f" and {len(lost) - 5} more" if len(lost) > 5 else "")
    return (
        f"`{getattr(function, '__qualname__', type(function).__qualname__)}` uses what is not among its arguments: "
        f"{listed}. The gradients of these do not come back from a worker: pass the module or the tensors as arguments"
    ), True


def _held(leaves: list[Tensor]) -> list[bool]:
    """For each leaf of the list, which is emptied, whether anything but its graph holds it."""
    made = nn.Parameter(torch.zeros((), device="cpu")) * 1
    leaves.extend(_leaves_below([made], set()))
    counts = []
    while leaves:
        leaf = leaves.pop()
        counts.append(sys.getrefcount(leaf))
    return [count > counts[0] for count in counts[:0:-1]]


def _leaves_below(outputs: Sequence[Tensor], known: set[int]) -> list[Tensor]:
    waiting = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    seen, leaves = set(waiting), []
    while waiting:
        node = waiting.pop()
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor) and id(variable) not in known:
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
    function = getattr(function, "__func__", function)
    if not isinstance(function, FunctionType) or id(function) in seen or _is_torchs(function):
        return
    seen.add(id(function))
    for name in dict.fromkeys(_names_in(function.__code__)):
        if name in function.__globals__:
            value = function.__globals__[name]
            yield from _tensors_in(name, value)
            yield from _globals_of(value, seen)


def _is_torchs(function: FunctionType) -> bool:
    return (function.__module__ or "").partition(".")[0] in ("torch", "torchopt_dist")


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _tensors_in(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, nn.Module):
        yield from ((f"{name}.{inner}", parameter) for inner, parameter in value.named_parameters())
    elif isinstance(value, (Tensor, dict, list, tuple)):
        tree: Any = value
        accessors, leaves, _ = optree.tree_flatten_with_accessor(tree)
        for accessor, leaf in zip(accessors, leaves, strict=True):
            if isinstance(leaf, Tensor):
                yield accessor.codify(name), leaf
            elif isinstance(leaf, nn.Module):
                yield from _tensors_in(accessor.codify(name), leaf)
