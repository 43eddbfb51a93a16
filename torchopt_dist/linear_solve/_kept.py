"""A function → one that, when it is called later, finds what its names and its modules' parameters were now."""

from __future__ import annotations

import contextlib
import dis
import functools
from collections.abc import Callable, Iterator
from types import CellType, CodeType, FunctionType
from typing import Any

import optree
from torch import Tensor, nn

from torchopt_dist._torch_private import parameters_of, set_parameters
from torchopt_dist.linear_solve._substitute import tensors_in

__all__ = ["closed_over", "kept", "modules_as_now"]


def kept(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function; what is bound anew later to a name that it takes tensors or functions from is not seen.

    So a loop may use one name for a matrix of each iteration. Names that the function itself assigns stay shared.
    """
    return _kept(function, {})


def _kept(function: Any, made: dict[int, Any]) -> Any:
    if type(function) is not FunctionType or not function.__closure__:
        return function
    if id(function) in made:
        return made[id(function)]
    cells: list[CellType] = []
    fixed: list[CellType] = []
    for name, cell in zip(function.__code__.co_freevars, function.__closure__, strict=True):
        is_fixed = name not in _assigned(function.__code__) and any(map(_matters, _contents(cell)))
        cells.append(CellType(cell.cell_contents) if is_fixed else cell)
        fixed += cells[-1:] if is_fixed else []
    new = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(cells)
    )
    new.__kwdefaults__ = function.__kwdefaults__
    vars(new).update(vars(function))
    made[id(function)] = new
    for cell in fixed:
        cell.cell_contents = _kept(cell.cell_contents, made)
    return new


def _matters(thing: Any) -> bool:
    return type(thing) is FunctionType or isinstance(thing, nn.Module) or bool(tensors_in(thing))


@functools.lru_cache(maxsize=1024)
def _assigned(code: CodeType) -> frozenset[str]:
    """The names of outer functions that a function, or one within it, assigns."""
    own = {one.argval for one in dis.get_instructions(code) if one.opname in ("STORE_DEREF", "DELETE_DEREF")}
    within = [_assigned(one) for one in code.co_consts if isinstance(one, CodeType)]
    return frozenset(own.union(*within))


def _contents(cell: CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # an empty one
        return []


def closed_over(function: Any) -> tuple[list[Tensor], list[nn.Module]]:
    """The tensors and the modules in the cells of a function, and of the functions in its cells."""
    tensors: list[Tensor] = []
    modules: list[nn.Module] = []
    waiting, visited = [function], set()
    while waiting:
        one = waiting.pop()
        if id(one) in visited:
            continue
        visited.add(id(one))
        if isinstance(one, nn.Module):
            modules.append(one)
        elif isinstance(one, functools.partial):
            waiting += [one.func, *one.args, *one.keywords.values()]
        elif isinstance(one, (list, tuple, dict)):
            waiting += optree.tree_leaves(one, none_is_leaf=True)  # type: ignore[arg-type]
        elif isinstance(one, Tensor):
            tensors.append(one)
        else:
            waiting += [part for cell in getattr(one, "__closure__", None) or () for part in _contents(cell)]
            waiting += [one.__self__] if isinstance(getattr(one, "__self__", None), nn.Module) else []
    return tensors, modules


def modules_as_now(modules: list[nn.Module]) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Make a function that makes contexts in which modules have the parameters that they have now."""
    every = {id(one): one for module in modules for one in module.modules()}.values()
    own = [(module, dict(parameters_of(module))) for module in every]
    own = [(module, parameters) for module, parameters in own if parameters]
    return functools.partial(_having, own)


@contextlib.contextmanager
def _having(own: list[tuple[nn.Module, Any]]) -> Iterator[None]:
    before = [(module, parameters_of(module)) for module, _ in own]
    for module, parameters in own:
        set_parameters(module, parameters)
    try:
        yield
    finally:
        for module, parameters in before:
            set_parameters(module, parameters)
