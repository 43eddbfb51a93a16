"""A function, its arguments and what it means → the graph of one run of it, in which tensors and numbers are inputs.

The function runs as it is, once, on stand-ins: tensors without values in the places of its arguments and of those that
it reaches by its names, and unknown numbers. What torch computes meanwhile is the graph. So all that works without a
compiler works here, but for what depends on the values of tensors, such as a branch.
"""

from __future__ import annotations

import operator
import pickle
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import optree
import torch
from torch import Tensor

from torchopt_dist.core.functional import replaced
from torchopt_dist.core.meaning import RefusedError
from torchopt_dist.core.program_inputs import Call
from torchopt_dist.core.random_turns import kept_generators
from torchopt_dist.core.substitution import Substitute
from torchopt_dist.core.surroundings import forget_casts
from torchopt_dist.core.uncompiled import tracing
from torchopt_dist.core.unconnected import unconnected
from torchopt_dist.core.vjp import leaf_like
from torchopt_dist.formulas.attention import attention_by_formula, without_fast_path
from torchopt_dist.formulas.index import selected
from torchopt_dist.torch_private import Trace, tensor_version

__all__ = ["Body", "Graph", "trace"]

Body = Callable[..., Any]
"""The meaning of things, the arguments → a tree of tensors; nothing in it decides but these."""

_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


class Graph(NamedTuple):
    """What a function computes."""

    module: Any
    """Of inputs → tensors."""
    trace: Trace
    stand_ins: list[Any]
    """For the inputs, as the compiler takes them."""
    inputs: list[int]
    """Which of the tensors, then of the numbers that are inputs, these are."""
    leaves: list[Any]
    """Of the result; in a tensor's place a :class:`Result`."""
    spec: Any
    changed: list[int]
    """Which of the tensors it changes in place."""


class Result(NamedTuple):
    """Stands for a tensor that the graph makes, or that the function was given and returns as it is."""

    number: int
    is_given: bool = False


def trace(body: Body, call: Call, tensors: Sequence[Tensor], unknown: Collection[int]) -> Graph:
    """The graph of a function.

    Args:
        body: the function.
        call: what it gets.
        tensors: the inputs of the call.
        unknown: the indices of its numbers that are inputs.

    Raises:
        RefusedError: it changes something beside tensors, or returns what is none.
        Exception: of any kind, where it depends on values.
    """
    traced, meaning, count = Trace(), call.meaning, len(call.tensors)
    places = sorted(unknown)
    stand_ins: list[Any] = [traced.tensor(tensor) for tensor in tensors]
    stand_ins += [traced.number(call.numbers[place]) for place in places]
    before = [tensor_version(one) for one in stand_ins[: len(tensors)]]
    made: list[Any] = []

    def function(*inputs: Any) -> list[Tensor]:
        known = dict(zip(places, map(traced.of_input, inputs[len(tensors) :]), strict=True))
        arrays = list(inputs[count + len(meaning.tensors) : len(tensors)])

        def in_place_of(thing: Any, number: int) -> Any:
            if isinstance(thing, np.ndarray):
                return _Array.of(thing, arrays[len(call.arrays) + number])
            return known.get(len(call.number_of) + number, thing)

        given, filled = iter(inputs), list(call.leaves)
        for place, leaf in enumerate(filled):
            if isinstance(leaf, Tensor):
                filled[place] = next(given)
            elif place in call.number_of:
                filled[place] = known.get(call.number_of[place], leaf)
        for place, array in zip(call.arrays, arrays, strict=False):
            filled[place] = _Array.of(filled[place], array)
        reached = [
            leaf_like(one) if tensor.requires_grad else one
            for one, tensor in zip(inputs[count:], meaning.tensors, strict=False)
        ]
        with (
            replaced(torch, {"from_numpy": _from_numpy}),
            meaning.standing_in(in_place_of) as now,
            _Inside(now.tensors, reached) as inside,
        ):
            for place, number in call.objects.items():
                filled[place] = now.things[number]
            returned = body(now, *optree.tree_unflatten(call.spec, filled))
            found, of_result = optree.tree_flatten(returned, none_is_leaf=True)
            found = [inside.stand_in_of(leaf) for leaf in found]
        results: dict[int, int] = {}
        tensors_made: list[Tensor] = []
        place_of = {id(one): number for number, one in enumerate(inputs)}
        for leaf in found:
            if isinstance(leaf, Tensor):
                if id(leaf) in place_of:
                    made.append(Result(place_of[id(leaf)], is_given=True))
                    continue
                if id(leaf) not in results:
                    results[id(leaf)] = len(tensors_made)
                    tensors_made.append(leaf.detach())
                made.append(Result(results[id(leaf)]))
            elif isinstance(leaf, (torch.SymInt, torch.SymFloat)):
                made.append(int(leaf) if isinstance(leaf, torch.SymInt) else float(leaf))
            elif isinstance(leaf, _CONSTANTS):
                made.append(leaf)
            else:
                raise RefusedError(f"it returns a {type(leaf).__qualname__}, which may hold tensors")
        made.append(of_result)
        return tensors_made

    with (
        kept_generators(),
        _randomness_of_torch_only(),
        attention_by_formula(),
        without_fast_path(),
        tracing(),
        unconnected(),  # which nobody is to be told of a run without values
    ):
        module = traced.graph(function, stand_ins)
    forget_casts()
    changed = [place for place, was in enumerate(before) if tensor_version(stand_ins[place]) != was]
    _refuse_objects(module)
    _with_products(module)
    used = _only_used(module)
    left = [stand_ins[place] for place in used]
    return Graph(module, traced, left, used, made[:-1], made[-1], changed)


class _Inside(Substitute):
    """A context in which stand-ins are in the places of tensors, and an index that is a tensor stays one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            tensor, index = args
            parts = index if type(index) is tuple else (index,)
            parts = tuple(one.tensor if isinstance(one, _Array) else self._replaced(one) for one in parts)
            return func(*selected(self._other(tensor), parts if type(index) is tuple else parts[0]))
        if args and isinstance(args[0], _Array):
            return args[0].tensor_by(func, args[1:], kwargs or {})
        if func in _OF_NUMBERS and isinstance(args[0], (torch.SymInt, torch.SymFloat)):
            usual = torch.int64 if isinstance(args[0], torch.SymInt) else torch.get_default_dtype()
            number: Any = args[0]
            return torch.full((), number, **{"dtype": usual, **(kwargs or {})})
        return super().__torch_function__(func, types, args, kwargs)


_OF_NUMBERS = (torch.tensor, torch.as_tensor, torch.asarray)


class _Array(np.ndarray[Any, Any]):
    """Stands for an array, of which torch makes tensors; nothing else knows its values.

    It has a dtype that torch refuses, so that no function makes a constant of it.
    """

    array: np.ndarray[Any, Any]
    tensor: Tensor

    @classmethod
    def of(cls, array: np.ndarray[Any, Any], tensor: Tensor) -> _Array:
        """What stands for an array, whose values a tensor has."""
        made = np.zeros(array.shape, np.dtype((np.void, array.itemsize))).view(cls)
        object.__setattr__(made, "array", array)
        object.__setattr__(made, "tensor", tensor)
        return made

    def __getattribute__(self, name: str) -> Any:
        if name in ("__class__", "array", "tensor", "tensor_by"):
            return super().__getattribute__(name)
        return getattr(self.array, name) if name in _KNOWN else _refuse_array()

    def __len__(self) -> int:
        return len(self.array)

    def tensor_by(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
        """What a function of torch makes of it."""
        made: Tensor
        if func is torch.as_tensor or func is torch.asarray:
            made = func(self.tensor, *args, **kwargs)
            return made
        if func is torch.tensor:
            wants = kwargs.pop("requires_grad", False)
            made = torch.as_tensor(self.tensor, *args, **kwargs).clone()
            return made.requires_grad_() if wants else made
        return _refuse_array()


def _refuse_array(*_: Any, **__: Any) -> Any:
    raise RefusedError("an array of numpy is used as it is: make a tensor of it first, by torch.as_tensor")


def _from_numpy(torchs: Callable[[Any], Tensor], array: Any) -> Tensor:
    return array.tensor if isinstance(array, _Array) else torchs(array)


_KNOWN = frozenset(("shape", "dtype", "ndim", "size", "strides", "itemsize", "nbytes", "flags"))
for _name in ("array_ufunc", "array_function", "getitem", "setitem", "iter", "contains", "bool", "index"):
    setattr(_Array, f"__{_name}__", _refuse_array)
for _name in ("float", "int", "complex", "array", "str", "repr"):
    setattr(_Array, f"__{_name}__", _refuse_array)


@contextmanager
def _randomness_of_torch_only() -> Iterator[None]:
    """A context at whose end Python's and numpy's generators must be as they were, and are."""
    before, of_numpy = random.getstate(), np.random.get_state()
    try:
        yield
        if before != random.getstate() or pickle.dumps(of_numpy) != pickle.dumps(np.random.get_state()):
            raise RefusedError("it draws random numbers of Python's or of numpy's: draw torch's")
    finally:
        random.setstate(before)
        np.random.set_state(of_numpy)


def _refuse_objects(module: Any) -> None:
    """Refuse a graph in which there is something else from outside than tensors."""
    for node in module.graph.find_nodes(op="get_attr"):
        if not isinstance(getattr(module, node.target), (Tensor, torch.fx.GraphModule)):
            raise RefusedError("it draws from a generator of its own, or uses another object of torch's")


def _with_products(module: Any) -> None:
    """Write the factor ``alpha`` of a sum as a product: Inductor (2.11 to 2.13) loses it beside one of matrices."""
    aten = torch.ops.aten
    for node in module.graph.nodes:
        packet = getattr(node.target, "overloadpacket", None)
        if packet in (aten.add, aten.sub, aten.add_, aten.sub_) and "alpha" in node.kwargs:
            other, alpha = node.args[1], node.kwargs["alpha"]
            is_tensor = isinstance(getattr(other, "meta", {}).get("val"), Tensor)
            with module.graph.inserting_before(node):
                scaled = module.graph.call_function(
                    aten.mul.Tensor if is_tensor else operator.mul, (other, alpha)
                )
            node.args, node.kwargs = (node.args[0], scaled), {}


def _only_used(module: Any) -> list[int]:
    """Take inputs out of a graph that nothing uses; which are left."""
    left = []
    for place, node in enumerate(list(module.graph.find_nodes(op="placeholder"))):
        if node.users:
            left.append(place)
        else:
            module.graph.erase_node(node)
    module.recompile()
    return left
